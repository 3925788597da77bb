"""`python -m semifed` is the command `semifed`."""

from semifed.cli import main

if __name__ == "__main__":
    main()

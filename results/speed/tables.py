"""The tables of a benchmark as Markdown: python results/speed/tables.py results/speed/bench.json > tables.md."""

import json
import sys
from pathlib import Path


def main() -> None:
    """Print every table with its title and what was done."""
    measured = json.loads(Path(sys.argv[1]).read_text())
    print(", ".join(f"{key} {value}" for key, value in measured["machine"].items()), end="\n\n")
    for part in measured["parts"].values():
        header = list(part["rows"][0])
        print(f"### {part['title']}\n{part['work']}\n")
        print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}")
        for row in part["rows"]:
            print(f"| {' | '.join('–' if row[name] is None else str(row[name]) for name in header)} |")
        print()


if __name__ == "__main__":
    main()

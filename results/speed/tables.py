"""The tables of a benchmark as Markdown: python results/speed/tables.py results/speed/bench.json > tables.md."""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def tables(measured: Mapping[str, Any]) -> Iterator[str]:
    """Lines of all tables, each with its title, what was done, and what is to know."""
    yield ", ".join(f"{key} {value}" for key, value in measured["machine"].items())
    for part in measured["parts"].values():
        header = part.get("header") or [name for row in part["rows"][:1] for name in row]  # older files have none
        yield from ("", f"### {part['title']}", part["work"], "")
        if part["rows"]:
            yield f"| {' | '.join(header)} |"
            yield f"|{'---|' * len(header)}"
        for row in part["rows"]:
            yield f"| {' | '.join('–' if row[name] is None else str(row[name]) for name in header)} |"
        if part["notes"]:
            yield from ("", *(f"- {note}" for note in part["notes"]))


def main() -> None:
    """Print every table."""
    print("\n".join(tables(json.loads(Path(sys.argv[1]).read_text()))))


if __name__ == "__main__":
    main()

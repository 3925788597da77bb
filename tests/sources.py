"""The kernels' sources with a change, for tests of what must then not be used."""

from pathlib import Path

from semifed.kernels import library


def changed_sources(folder: Path, line: str, other: str) -> tuple[Path, ...]:
    """The sources, one of them with `other` in place of the one `line`."""
    changed = []
    for source in library.SOURCES:
        text = source.read_text()
        assert text.count(line) <= 1
        path = folder / source.name
        path.write_text(text.replace(line, other))
        changed.append(path if line in text else source)
    assert tuple(changed) != library.SOURCES
    return tuple(changed)

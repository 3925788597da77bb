"""HTML pages from the templates of this package: one file each, nothing loaded from anywhere."""

import os
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from semifed.errors import not_written
from semifed.report.svg import PALETTE

if TYPE_CHECKING:
    from jinja2 import Environment


def render(template: str, **context: object) -> str:
    """The page of a template; every value is escaped unless it is Markup."""
    return _environment().get_template(template).render(palette=PALETTE, **context)


def write_page(path: Path, content: str | bytes) -> None:
    """Writes a page or picture so that a reader sees the old one or the new one, never half of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(partial, path)
    except OSError as error:
        raise not_written(path, error) from None
    finally:
        with suppress(OSError):
            partial.unlink()


@cache
def _environment() -> "Environment":
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("semifed.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )

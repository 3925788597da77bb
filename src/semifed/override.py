"""KEY=VALUE on the command line: special keys, and values as TOML with quotes left out where nothing is lost."""

import re
import tomllib
from typing import Any

METHOD_KEYS = ("method", "method.name")  # both switch the method, with all that it brings


def moves_numbers(key: str) -> bool:
    """Whether a dotted key may.

    Neither where clients run does, nor where images lie, whose content is compared, nor with how few clients a round
    is given up.
    """
    return key not in ("data", "min_clients") and not key.startswith("engine.")


def parsed_value(text: str) -> Any:
    """Numbers, booleans, lists and tables as in TOML; any other text is itself.

    >>> [parsed_value(text) for text in ("1e-3", ".5", "true", "[16, 32]", "[mnist, gaussian]", "flip crop(4)")]
    [0.001, 0.5, True, [16, 32], ['mnist', 'gaussian'], 'flip crop(4)']
    """
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        if text.startswith("[") and text.endswith("]") and text.count("[") == 1:
            return [parsed_value(part.strip()) for part in split_values(text[1:-1])]
        return float(text) if re.fullmatch(r"[+-]?(\d+\.|\.\d+)(e[+-]?\d+)?", text, re.IGNORECASE) else text


def split_values(text: str) -> list[str]:
    """Split at commas that are not inside brackets or quotes.

    >>> split_values("0.1,[16, 32],'a,b',crop(1,2)")
    ['0.1', '[16, 32]', "'a,b'", 'crop(1,2)']
    """
    return re.findall(r"(?:\[[^\]]*\]|\([^)]*\)|'[^']*'|\"[^\"]*\"|[^,])+", text)


def tuples(value: Any) -> Any:
    """The same tables with every list as a tuple: a recipe does not change."""
    if isinstance(value, dict):
        return {key: tuples(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return tuple(tuples(inner) for inner in value)
    return value

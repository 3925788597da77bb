"""The tables of keys in the documentation are those of the code. `pytest --regolden` writes them anew."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from pydantic import TypeAdapter, ValidationError

from semifed import listing
from semifed.errors import UserError
from semifed.methods import method_class, method_names
from semifed.options import options_of, tables_of, values_of
from semifed.recipe import Recipe

DOCS = Path(__file__).parents[1] / "docs"
WITH_OPTIONS = [name for name in method_names() if fields(method_class(name))]
SECTION = "## Options\n"
ALL_KEYS = "## All keys\n"


def as_markdown(rows: listing.Rows) -> str:
    lines = [f"| `{row['name']}` | {_quoted(row)} | {row['values']} | {row['what']} |" for row in rows]
    return "\n".join(["| key | default | values | what it is |", "|---|---|---|---|", *lines]) + "\n"


def _quoted(row: dict[str, str]) -> str:
    return row["default"] if row["default"] in ("–", "must be given") else f"`{row['default']}`"


def held_to(page: Path, heading: str, expected: str, request: pytest.FixtureRequest) -> None:
    """The table is the last thing on its page."""
    before, _, after = page.read_text().partition(f"\n{heading}")
    if request.config.getoption("--regolden"):
        page.write_text(f"{before.rstrip()}\n\n{heading}{expected}")
    else:
        assert after == expected, f"{page.name} is not what the code says: pytest --regolden tests/test_options.py"


@pytest.mark.parametrize("name", WITH_OPTIONS)
def test_a_card_lists_the_options_of_its_method(name: str, request: pytest.FixtureRequest) -> None:
    held_to(DOCS / "methods" / f"{name}.md", SECTION, as_markdown(listing.methods(name)), request)


@pytest.mark.parametrize("name", sorted(set(method_names()) - {"untrained"}))
def test_a_card_numbers_what_was_chosen(name: str) -> None:
    """The tables of options were once written over these."""
    card = (DOCS / "methods" / f"{name}.md").read_text()
    assert re.search(r"^## .*(Choices|chose|paper )", card, re.MULTILINE)
    assert re.search(r"^\| 1 \|", card, re.MULTILINE)


def test_the_page_of_recipes_lists_all_keys(request: pytest.FixtureRequest) -> None:
    held_to(DOCS / "recipes.md", ALL_KEYS, as_markdown(listing.keys()), request)


@pytest.mark.parametrize("name", WITH_OPTIONS)
def test_every_option_of_a_method_says_what_it_is(name: str) -> None:
    assert not [one.name for one in options_of(method_class(name)) if not one.what]


@pytest.mark.parametrize("kind", [Recipe, *tables_of(Recipe).values(), *map(method_class, WITH_OPTIONS)])
def test_ranges_in_words_are_those_that_are_checked(kind: type) -> None:
    hints = get_type_hints(kind, include_extras=True)
    for one in options_of(kind):
        for wrong in beyond(one.values):
            with pytest.raises(ValidationError):
                TypeAdapter(hints[one.name]).validate_python(wrong, strict=True)


def beyond(values: str) -> list[Any]:
    """Values outside of what the words say; nothing where they say no single range."""
    number = int if values.startswith("whole") else float
    words = values.removeprefix("whole, ").split()
    match words:
        case [low, "to", high]:
            return [number(low) - 1, number(high) + 1]
        case ["≥", low]:
            return [number(low) - 1]
        case [">", low]:
            return [number(low)]
        case ["≥" | ">" as sign, low, "and", "<" | "≤" as other, high]:
            return [
                number(low) - (0.5 if sign == "≥" else 0),
                number(high) + (0.5 if other == "≤" else 0),
            ]
    return []


def test_what_may_be_given_is_said_in_words() -> None:
    hints = get_type_hints(method_class("proxyfl"), include_extras=True)
    assert values_of(hints["categories"]) == "prior or whole, ≥ 1"
    assert values_of(get_type_hints(tables_of(Recipe)["model"], include_extras=True)["width"]) == (
        "> 0 and ≤ 32 or list: whole, 1 to 4096"
    )
    assert beyond("> 0 and ≤ 1") == [0, 1.5]


def test_keys_are_listed_by_table() -> None:
    local = listing.keys("local")
    assert [row["name"] for row in local][:2] == ["local.epochs", "local.steps"]
    every = listing.keys()
    assert every[0] == {
        "name": "dataset",
        "values": "text",
        "default": "must be given",
        "what": "a name of semifed list datasets, an .npz, a folder of images, hub:NAME",
    }
    assert [row for row in every if row["name"].startswith("local.")] == local
    with pytest.raises(UserError, match="has no table 'lokal'; did you mean 'local'"):
        listing.keys("lokal")


def test_a_method_without_options_says_so() -> None:
    assert listing.methods("fedavg") == [{"name": "none", "what": "fedavg has no options"}]
    with pytest.raises(UserError, match="no method 'opnfl'; did you mean 'openfl'"):
        listing.methods("opnfl")

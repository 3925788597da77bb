"""Data sets of the Hugging Face hub: the only ones that are downloaded, because their name asks for it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.parse import parse_qsl

import numpy as np
from PIL import Image

from semifed.data.formats import Arrays, Labels, Pixels
from semifed.data.image_folder import CommonForm, damage_told, pixels_of, with_a_fifth_held_out
from semifed.errors import UserError, nearest

PREFIX = "hub:"
TESTS = ("test", "validation", "valid", "val")  # what the held-out split is called, the first that is there


class HubName(NamedTuple):
    """`hub:NAME?key=value&...`: a name on the hub or a folder, and what cannot be guessed of it."""

    name: str
    config: str | None = None
    image: str | None = None  # column
    label: str | None = None  # column
    owner: str | None = None  # column: who holds a training image, for partition = "folders"
    train: str = "train"  # split
    test: str | None = None  # split

    @classmethod
    def parse(cls, text: str) -> Self:
        """From a recipe's `dataset`."""
        name, _, rest = text.removeprefix(PREFIX).partition("?")
        try:
            options = dict(parse_qsl(rest, strict_parsing=True)) if rest else {}
        except ValueError:
            raise UserError(f"{text}: expected key=value&key=value behind '?', found {rest!r}") from None
        for key in options:
            if key not in cls._fields[1:]:
                raise UserError(f"{text}: unknown '{key}': {nearest(key, cls._fields[1:])}")
        if not name:
            raise UserError(f"{text}: expected the name of a data set, such as hub:ylecun/mnist")
        return cls(name, **options)


def read_hub_set(text: str) -> Arrays:
    """A data set by its name on the hub, or a folder that `save_to_disk` wrote or that holds its files."""
    wanted = HubName.parse(text)
    splits = _loaded(wanted, text)
    test = wanted.test or next((name for name in TESTS if name in splits), None)
    asked = list(filter(None, (wanted.train, test)))
    if not set(asked) <= set(splits):
        raise UserError(f"{text}: expected the splits {' and '.join(asked)}, found {', '.join(splits)}")
    parts = [splits[split] for split in asked]
    features = parts[0].features
    image = wanted.image or _only_column(features, "Image", "image", text)
    label = wanted.label or _only_column(features, "ClassLabel", "label", text)
    for column in filter(None, (image, label, wanted.owner)):
        if column not in features:
            raise UserError(f"{text}: there is no column '{column}': {nearest(column, features)}")
    if type(features[image]).__name__ != "Image":
        raise UserError(f"{text}: the column '{image}' holds no images but {type(features[image]).__name__}")
    form = CommonForm()
    with damage_told(text):
        for part in parts:
            for picture in _opened(part, image):
                form.see(picture)
        x = [_pixels(part, image, form, text) for part in parts]
    named = getattr(features[label], "names", None)
    values = [_complete(part, label, text) for part in parts]
    classes = named or sorted(set().union(*values))
    y = [np.array(own, np.int64) if named else _places_in(classes, own) for own in values]
    names = tuple(map(str, classes))
    owner = None
    if wanted.owner is not None:  # clients are numbered in the order of their names
        owners = _complete(parts[0], wanted.owner, text)
        owner = _places_in(sorted(set(owners)), owners)
    if test is not None:
        return Arrays(x[0], y[0], x[1], y[1], names, owner)
    kept, held = with_a_fifth_held_out(y[0], text)
    owner = None if owner is None else owner[kept]
    return Arrays(x[0][kept], y[0][kept], x[0][held], y[0][held], names, owner, undivided=True)


def _complete(part: Any, column: str, text: str) -> list[Any]:
    """A column; every image must have a value."""
    values = list(part[column])
    if None in values:
        raise UserError(f"{text}: row {values.index(None)} has nothing in the column '{column}'")
    return values


def _loaded(wanted: HubName, text: str) -> Mapping[str, Any]:
    try:
        import datasets
    except ImportError:
        raise UserError("data sets of the hub need the package datasets: pip install 'semifed[hub]'") from None
    try:
        if (Path(wanted.name) / "dataset_dict.json").is_file():
            loaded: Mapping[str, Any] = datasets.load_from_disk(wanted.name)
        else:
            loaded = datasets.load_dataset(wanted.name, wanted.config)
    # No such set, no such config, no network, damaged files.
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{text}: could not be loaded: {first_line}") from None
    return loaded


def _only_column(features: Mapping[str, Any], kind: str, key: str, text: str) -> str:
    """The column of that kind of feature, if there is but one."""
    columns = [name for name, feature in features.items() if type(feature).__name__ == kind]
    if len(columns) == 1:
        return columns[0]
    found = f"of the columns {', '.join(columns or features)}"
    raise UserError(f"{text}: which {found} holds the {key}? say so: {text}{'&' if '?' in text else '?'}{key}=COLUMN")


def _opened(part: Any, column: str) -> Iterator[Image.Image]:
    """The images with their size and mode, their pixels not yet read."""
    import datasets

    for number, stored in enumerate(part.cast_column(column, datasets.Image(decode=False))[column]):
        if stored is None:
            raise UserError(f"column {column}: image {number} is missing")
        with Image.open(stored["path"] if stored["bytes"] is None else BytesIO(stored["bytes"])) as picture:
            yield picture


def _pixels(part: Any, column: str, form: CommonForm, text: str) -> Pixels:
    pixels = np.empty((len(part), 1 if form.grey else 3, *form.size), np.uint8)
    for number, picture in enumerate(part[column]):
        pixels[number] = pixels_of(picture, f"{text}, image {number}", form.size, form.grey)
    return pixels


def _places_in(names: Sequence[Any], values: Iterable[Any]) -> Labels:
    place = {name: number for number, name in enumerate(names)}
    return np.array([place[value] for value in values], np.int64)

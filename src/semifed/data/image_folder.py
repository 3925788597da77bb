"""Folders of images: a class a folder, for a whole data set or for each client."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from semifed.data.formats import DAMAGE, Arrays, Labels, Pixels, stratified_split
from semifed.errors import UserError

IMAGE_SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"))
LARGEST_MIXED_SIDE = 64  # pixels; folders of differently sized photographs are brought down to this


def read_image_folder(folder: Path) -> Arrays:
    """Class folders in train/ and test/, or in clients/CLIENT/ and test/, or alone with a fixed fifth held out.

    With clients/, the clients are numbered in the order of their names.
    """
    training = next((name for name in ("clients", "train") if (folder / name).is_dir()), None)
    if training is None:
        return _with_test_held_out(folder)
    if not (folder / "test").is_dir():
        raise UserError(f"{folder}: expected the folder 'test' beside '{training}'")
    parts = _subfolders(folder / "clients") if training == "clients" else [folder / "train"]
    if not parts:
        raise UserError(f"{folder / 'clients'}: expected a folder for each client, found none")
    *train, test = _read_classes([*parts, folder / "test"])
    classes = test[2]
    owner = np.repeat(np.arange(len(train)), [len(y) for _, y, _ in train]) if training == "clients" else None
    x = np.concatenate([part[0] for part in train])
    y = np.concatenate([part[1] for part in train])
    return Arrays(x, y, test[0], test[1], classes, owner)


def _with_test_held_out(folder: Path) -> Arrays:
    ((x, y, classes),) = _read_classes([folder])
    kept, held = with_a_fifth_held_out(y, str(folder))
    return Arrays(x[kept], y[kept], x[held], y[held], classes, undivided=True)


def with_a_fifth_held_out(labels: Labels, where: str) -> tuple[Labels, Labels]:
    """Positions to train and to test on, where nobody has divided the images: the same for ever."""
    fifth = {label: round(int(n) / 5) for label, n in enumerate(np.bincount(labels))}
    # two images are the fewest that can serve both sides
    counts = {label: max(n, 1) if np.count_nonzero(labels == label) > 1 else 0 for label, n in fifth.items()}
    if not any(counts.values()):
        raise UserError(f"{where}: expected at least two images in some class to divide into train and test")
    return stratified_split(labels, counts)


def _read_classes(folders: list[Path]) -> list[tuple[Pixels, Labels, tuple[str, ...]]]:
    """Images and labels of several folders of classes, in one form and with one list of class names."""
    parts = [_class_folders(folder) for folder in folders]
    classes = tuple(sorted(set(chain.from_iterable(parts))))
    form = CommonForm()
    for path in chain.from_iterable(chain.from_iterable(part.values()) for part in parts):
        with _opened(path) as image:
            form.see(image)
    size, grey = form.size, form.grey
    read: list[tuple[Pixels, Labels, tuple[str, ...]]] = []
    for part in parts:
        labelled = [(path, classes.index(name)) for name, paths in part.items() for path in paths]
        x = np.empty((len(labelled), 1 if grey else 3, *size), np.uint8)
        for row, (path, _) in zip(x, labelled, strict=True):
            row[:] = read_image(path, size, grey)
        read.append((x, np.array([label for _, label in labelled], np.int64), classes))
    return read


def image_files(folder: Path) -> list[Path]:
    """All image files below a folder in a fixed order; hidden ones and other files are left out."""
    files = (p for p in folder.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES and p.is_file())
    return sorted(p for p in files if not any(part.startswith(".") for part in p.relative_to(folder).parts))


def _is_grey(mode: str) -> bool:
    return mode in ("1", "L", "LA") or mode.startswith("I")


def read_image(path: Path, size: tuple[int, int] | None = None, grey: bool | None = None) -> Pixels:
    """One image as uint8 [c, h, w], upright, resized to (height, width) and made grey or RGB if asked."""
    with _opened(path) as image:
        return pixels_of(image, str(path), size, grey)


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    with damage_told(str(path)), Image.open(path) as image:
        yield image


@contextmanager
def damage_told(where: str) -> Iterator[None]:
    """Images that cannot be read are the user's, and told in a line."""
    try:
        yield
    except (*DAMAGE, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(f"{where}: not a readable image ({error})") from None


def pixels_of(image: Image.Image, where: str, size: tuple[int, int] | None = None, grey: bool | None = None) -> Pixels:
    """An opened image as uint8 [c, h, w], upright, resized to (height, width) and made grey or RGB if asked."""
    image = ImageOps.exif_transpose(image)
    image.load()
    if image.mode == "F":
        raise UserError(f"{where}: expected 8- or 16-bit pixels, found floating point")
    if image.mode.startswith("I"):
        # Pillow would clip 16-bit grey at 255 instead of scaling it
        image = Image.fromarray((np.asarray(image).astype(np.int64).clip(0, 65535) >> 8).astype(np.uint8))
    if grey is None:
        grey = _is_grey(image.mode)
    if image.has_transparency_data:
        whole = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", whole.size, "white"), whole)  # as on paper
    image = image.convert("L" if grey else "RGB")
    if size is not None and (image.height, image.width) != size:
        image = image.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    pixels = np.asarray(image)
    return pixels[None] if grey else np.ascontiguousarray(pixels.transpose(2, 0, 1))


class CommonForm:
    """The one size and colour that images of several sizes and colours are brought to."""

    def __init__(self) -> None:
        self._sizes: Counter[tuple[int, int]] = Counter()
        self.grey = True  # unless one of them is not

    def see(self, image: Image.Image) -> None:
        """Count one more image; only a TIFF's pixels are read."""
        if image.format == "TIFF":  # some versions of Pillow turn its size before its pixels, some do not
            image = ImageOps.exif_transpose(image)
        turned = image.getexif().get(0x0112, 1) >= 5  # EXIF orientations 5 to 8 lie on their side
        self._sizes[(image.width, image.height) if turned else (image.height, image.width)] += 1
        self.grey = self.grey and _is_grey(image.mode)

    @property
    def size(self) -> tuple[int, int]:
        """Theirs where they have one; otherwise a square, as the most frequent but not too large."""
        if len(self._sizes) == 1:
            return next(iter(self._sizes))
        frequent = max(self._sizes, key=lambda size: (self._sizes[size], size))
        side = min(max(frequent), LARGEST_MIXED_SIDE)
        return side, side


def _subfolders(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def _class_folders(folder: Path) -> dict[str, list[Path]]:
    children = _subfolders(folder)
    if not children:
        raise UserError(
            f"{folder}: expected one folder of images a class, found none; a simulation needs the classes "
            "of all images to measure itself by, images without are for semifed deploy"
        )
    for child in children:
        if child.name != child.name.encode(errors="replace").decode():  # it would end the report, after the training
            raise UserError(f"{folder}: the class folder {child.name!r} has a name that is not UTF-8; rename it")
    by_class = {child.name: image_files(child) for child in children}
    for child in children:
        if not by_class[child.name]:
            raise UserError(f"{child}: expected images ({', '.join(sorted(IMAGE_SUFFIXES))}), found none")
    return by_class

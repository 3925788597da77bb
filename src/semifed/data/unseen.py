"""Images of no known class, shaped like a data set: noise, shuffled patches, and other data sets."""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from semifed.data.datasets import Dataset, UnknownDataset, catalogue, load
from semifed.errors import UserError, nearest

_CHUNK = 1_000  # images held as floating point at a time
_PATCHES = 4  # a side
_LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601


def _chunks(count: int) -> Iterator[slice]:
    return (slice(start, min(start + _CHUNK, count)) for start in range(0, count, _CHUNK))


def _to_bytes(pixels: Tensor) -> Tensor:
    return pixels.round_().clamp_(0, 255).to(torch.uint8)


def _some(images: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """At most `count` of the images, drawn without replacement and kept in their order."""
    if len(images) <= count:
        return images
    return images[torch.randperm(len(images), generator=generator)[:count].sort().values]


def _gaussian(like: Dataset, count: int, generator: torch.Generator) -> Tensor:
    # ODIN (Liang et al. 2018): N(0.5, 1) a pixel, clipped to [0, 1]
    images = torch.empty(count, *like.x_test.shape[1:], dtype=torch.uint8)
    for part in _chunks(count):
        images[part] = _to_bytes(torch.randn(images[part].shape, generator=generator).add_(0.5).mul_(255))
    return images


def _uniform(like: Dataset, count: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 256, (count, *like.x_test.shape[1:]), dtype=torch.uint8, generator=generator)


def _permutations(count: int, places: int, generator: torch.Generator) -> Tensor:
    """Random permutations [count, places], none of them the identity."""
    permutations = torch.rand(count, places, generator=generator).argsort(dim=1)
    identity = torch.arange(places)
    unmoved = (permutations == identity).all(dim=1)
    permutations[unmoved] = identity.roll(1)
    return permutations


def _patch_shuffle(like: Dataset, count: int, generator: torch.Generator) -> Tensor:
    images = _some(like.x_test, count, generator).clone()
    total, channels, height, width = images.shape
    rows, columns = height // _PATCHES, width // _PATCHES
    if not (rows and columns):
        raise UserError(f"patch-shuffle: expected images of at least 4x4 pixels, found {height}x{width}")
    # sides that four does not divide keep a border of up to three pixels in place
    inner = images[:, :, : rows * _PATCHES, : columns * _PATCHES]
    grid = inner.reshape(total, channels, _PATCHES, rows, _PATCHES, columns).permute(0, 2, 4, 1, 3, 5)
    patches = grid.reshape(total, _PATCHES**2, channels, rows, columns)
    order = _permutations(total, _PATCHES**2, generator)
    moved = patches[torch.arange(total)[:, None], order].reshape(grid.shape)
    inner[:] = moved.permute(0, 3, 1, 4, 2, 5).reshape(inner.shape)
    return images


_MADE: Mapping[str, Callable[[Dataset, int, torch.Generator], Tensor]] = {
    "gaussian": _gaussian,
    "uniform": _uniform,
    "patch-shuffle": _patch_shuffle,
}


def converted(images: Tensor, geometry: tuple[int, int, int]) -> Tensor:
    """Images uint8 [n, c, h, w] brought to another number of channels, height and width; unchanged if alike."""
    channels, height, width = geometry
    if images.shape[1:] == geometry:
        return images
    if (images.shape[1], channels) not in ((1, 1), (3, 3), (1, 3), (3, 1)):
        raise UserError(f"cannot turn images of {images.shape[1]} channels into {channels}; expected 1 or 3")
    target = torch.empty(len(images), channels, height, width, dtype=torch.uint8)
    luma = torch.tensor(_LUMA).view(1, 3, 1, 1)
    for part in _chunks(len(images)):
        pixels = images[part].float()
        if pixels.shape[1] > channels:
            pixels = (pixels * luma).sum(dim=1, keepdim=True)
        if pixels.shape[2:] != (height, width):
            pixels = interpolate(pixels, (height, width), mode="bilinear", antialias=True, align_corners=False)
        target[part] = _to_bytes(pixels)  # a single grey channel spreads over three here
    return target


def images_like(name: str, like: Dataset, *, seed: int, data: str | None = None, count: int = 10_000) -> Tensor:
    """At most `count` unseen images, uint8 [n, c, h, w], in the geometry of `like`: made, or of another data set.

    These are its test images, or all where nobody divided it: nothing of it is trained on.
    """
    if count < 1:
        raise UserError(f"count = {count}: expected at least one image")
    generator = torch.Generator().manual_seed(seed)
    if name in _MADE:
        return _MADE[name](like, count, generator)
    try:
        foreign = load(name, data)
    except UnknownDataset:
        hint = nearest(name, (*_MADE, *(entry.name for entry in catalogue(data))))
        raise UserError(
            f"unknown unseen set '{name}': {hint}\nA path to an .npz or to an image folder also works."
        ) from None
    channels, height, width = like.x_test.shape[1:]
    images = torch.cat([foreign.x_train, foreign.x_test]) if foreign.undivided else foreign.x_test
    return converted(_some(images, count, generator), (channels, height, width)).contiguous()

"""What a network sees of an image: plain, weakly and strongly augmented views, drawn and computed for whole batches.

Every random step first draws its parameters (`draw`), then applies them (`apply`), so that the parameters can be
inspected and given to another implementation.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from semifed.data import image_ops
from semifed.data.randaugment import RandAugment, RandAugmentDraw, integers
from semifed.errors import UserError, nearest

_GREY = 127
_NO_STEP = "none"


class Window(NamedTuple):
    """Source rows [n, h] and columns [n, w] of each sample: what flips and crops amount to."""

    rows: Tensor
    columns: Tensor

    def then(self, later: "Window") -> "Window":
        """Both windows in one, this one first."""
        return Window(self.rows.gather(1, later.rows), self.columns.gather(1, later.columns))


@dataclass(frozen=True, eq=False)
class FlipDraw:
    """Which samples are mirrored."""

    mask: Tensor  # bool [n]

    def window(self, height: int, width: int) -> Window:
        """Where the mirrored pixels come from."""
        rows = torch.arange(height, device=self.mask.device).expand(len(self.mask), height)
        return Window(rows, _mirrored(width, self.mask.device).index_select(0, self.mask.int()))


@dataclass(frozen=True, eq=False)
class CropDraw:
    """Where each window lies in the padded image."""

    padding: int
    top: Tensor  # [n], 0 to 2 * padding
    left: Tensor

    def window(self, height: int, width: int) -> Window:
        """Where the pixels inside the window come from."""
        device = self.top.device
        return Window(
            _reflected(self.padding, height, device).index_select(0, self.top),
            _reflected(self.padding, width, device).index_select(0, self.left),
        )


@dataclass(frozen=True, eq=False)
class CutoutDraw:
    """The centre of each sample's box, in pixels."""

    size: int
    cx: Tensor  # [n], 0 <= cx < w
    cy: Tensor

    def apply(self, images: Tensor, fill: int) -> Tensor:
        """The images with the box painted over."""
        return image_ops.cutout(images, self.cx, self.cy, self.size, fill)


Draw = FlipDraw | CropDraw | RandAugmentDraw | CutoutDraw


@dataclass(frozen=True)
class Flip:
    """Mirror left and right with probability one half."""

    def draw(self, images: Tensor, generator: torch.Generator) -> FlipDraw:
        """A coin for each sample."""
        return FlipDraw(integers(0, 2, (len(images),), images, generator).bool())


@dataclass(frozen=True)
class Crop:
    """Pad by reflection, then cut a window of the old size anywhere."""

    pixels: int

    def __post_init__(self) -> None:
        if self.pixels < 1:
            raise ValueError("pixels must be at least 1")

    def draw(self, images: Tensor, generator: torch.Generator) -> CropDraw:
        """Offsets of each window."""
        height, width = images.shape[2:]
        if self.pixels >= min(height, width):
            raise UserError(
                f"views: crop({self.pixels}) reflects {self.pixels} pixels at each edge, so both sides of an image"
                f" must be longer than that; these images are {height}x{width}"
            )
        top, left = integers(0, 2 * self.pixels + 1, (2, len(images)), images, generator)
        return CropDraw(self.pixels, top, left)


@dataclass(frozen=True)
class Cutout:
    """Paint a box over: grey on colour images, the dataset's mean level on images of one channel."""

    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError("size must be at least 1")

    def draw(self, images: Tensor, generator: torch.Generator) -> CutoutDraw:
        """A centre for each sample, uniform over the image."""
        height, width = images.shape[2:]
        # Single precision could round a centre up to the far edge.
        unit = torch.rand(2, len(images), generator=generator, device=generator.device, dtype=torch.float64)
        cx, cy = unit.to(images.device)
        return CutoutDraw(self.size, cx * width, cy * height)


Step = Flip | Crop | RandAugment | Cutout
_STEPS: dict[str, type[Step]] = {"flip": Flip, "crop": Crop, "randaugment": RandAugment, "cutout": Cutout}


def draw(steps: Sequence[Step], images: Tensor, generator: torch.Generator) -> tuple[Draw, ...]:
    """The parameters of every step for every image."""
    return tuple(step.draw(images, generator) for step in steps)


def joined(draws: Sequence[Draw]) -> Draw:
    """One step's parameters for several batches as those for all of them together."""
    kind: Any = type(draws[0])
    values = [[getattr(draw, one.name) for draw in draws] for one in fields(kind)]
    whole: Draw = kind(*(torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0] for parts in values))
    return whole


def apply(draws: Sequence[Draw], images: Tensor, *, fill: int) -> Tensor:
    """The images after every step; uint8 [n, c, h, w] in and out, boxes painted with the level `fill`."""
    height, width = images.shape[2:]
    window: Window | None = None  # neighbouring flips and crops move the pixels once
    for one in draws:
        if isinstance(one, FlipDraw | CropDraw):
            later = one.window(height, width)
            window = later if window is None else window.then(later)
            continue
        if window is not None:
            images, window = image_ops.take_window(images, *window), None
        images = one.apply(images, fill) if isinstance(one, CutoutDraw) else one.apply(images)
    return images if window is None else image_ops.take_window(images, *window)


def parse_steps(text: str, *, key: str) -> tuple[Step, ...]:
    """Steps from words such as "flip crop(4)"; `key` names the setting in complaints.

    >>> parse_steps("flip crop(4)", key="views.weak")
    (Flip(), Crop(pixels=4))
    """
    words = re.findall(r"[^\s(]*\([^)]*\)\S*|\S+", text)
    if words == [_NO_STEP]:
        return ()
    if not words:
        raise UserError(f"{key}: no step given; write '{_NO_STEP}' for images as they are")
    return tuple(_parse_step(word, text, key) for word in words)


def _parse_step(word: str, text: str, key: str) -> Step:
    name = word.split("(")[0]
    if name == _NO_STEP:
        raise UserError(f"{key}: '{word}' stands alone, not with other steps as in '{text}'")
    if name not in _STEPS:
        raise UserError(f"{key}: unknown step '{word}' in '{text}'; {nearest(name, (*_STEPS, _NO_STEP))}")
    parameters = [field.name for field in fields(_STEPS[name])]
    usage = f"{name}({', '.join(parameters)})" if parameters else name
    numbers = r"\s*,\s*".join([r"(\d+)"] * len(parameters))
    match = re.fullmatch(rf"{name}\(\s*{numbers}\s*\)" if parameters else name, word)
    if match is None:
        whole = " with whole numbers" if parameters else ""
        raise UserError(f"{key}: cannot read step '{word}' in '{text}'; did you mean '{usage}'{whole}?")
    try:
        return _STEPS[name](*map(int, match.groups()))
    except ValueError as error:
        raise UserError(f"{key}: step '{word}' in '{text}': {error} in '{usage}'") from None


@dataclass(frozen=True)
class Views:
    """What a network sees of an image: plain, weakly and strongly augmented.

    Views are normalised float32 in channels_last memory format and depend only on the images and the generator's state.
    """

    weak_steps: tuple[Step, ...]
    strong_steps: tuple[Step, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std) or not self.mean or min(self.std) <= 0:
            raise ValueError(f"one mean and one positive deviation a channel, not {self.mean} and {self.std}")

    @classmethod
    def parse(cls, weak: str, strong: str, *, mean: Sequence[float], std: Sequence[float]) -> "Views":
        """Views from the settings `views.weak` and `views.strong`, normalised by the dataset's mean and deviation."""
        return cls(
            weak_steps=parse_steps(weak, key="views.weak"),
            strong_steps=parse_steps(strong, key="views.strong"),
            mean=tuple(mean),
            std=tuple(std),
        )

    @property
    def fill(self) -> int:
        """The level that cutout paints: the dataset's mean for one channel, else grey."""
        return min(max(round(255 * self.mean[0]), 0), 255) if len(self.mean) == 1 else _GREY

    def plain(self, images: Tensor) -> Tensor:
        """The images as they are: uint8 [n, c, h, w] to normalised float32."""
        return self._normalised(self._checked(images))

    def weak(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """A weak view of each image."""
        return self._view(self.weak_steps, images, generator)

    def strong(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """A strong view of each image."""
        return self._view(self.strong_steps, images, generator)

    def flip(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """The second weak view of SSB: mirrored by chance; where mirroring is not allowed, a weak view."""
        return self._view(self.flip_steps, images, generator)

    @property
    def flip_steps(self) -> tuple[Step, ...]:
        """The steps of `flip`."""
        return tuple(step for step in self.weak_steps if isinstance(step, Flip)) or self.weak_steps

    @property
    def uncut_steps(self) -> tuple[Step, ...]:
        """The steps of a strong view but for cutout."""
        return tuple(step for step in self.strong_steps if not isinstance(step, Cutout))

    def several(
        self, steps: tuple[Step, ...], parts: Sequence[Tensor], generators: Sequence[torch.Generator]
    ) -> tuple[Tensor, ...]:
        """A view of each part, drawn from the part's own generator; the pixels of all parts move in one go."""
        images = torch.cat([self._checked(part) for part in parts])
        draws = zip(*(draw(steps, *each) for each in zip(parts, generators, strict=True)), strict=True)
        view = self._normalised(apply([joined(one) for one in draws], images, fill=self.fill))
        parted: tuple[Tensor, ...] = view.split([len(part) for part in parts])
        return parted

    def _view(self, steps: tuple[Step, ...], images: Tensor, generator: torch.Generator) -> Tensor:
        return self.several(steps, [images], [generator])[0]

    def _checked(self, images: Tensor) -> Tensor:
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != len(self.mean):
            raise ValueError(
                f"views need uint8 images [n, {len(self.mean)}, h, w], not {images.dtype} {list(images.shape)}"
            )
        return images

    def _normalised(self, images: Tensor) -> Tensor:
        count, channels, height, width = images.shape
        # Written channel by channel, then scaled in whole rows of interleaved channels: a copy between the layouts or a
        # broadcast over three channels would cost as much as the augmentation.
        view = torch.empty(count, height, width, channels, device=images.device)
        for channel in range(channels):
            view[..., channel] = images[:, channel]
        scale, shift = _row_constants(self.mean, self.std, width, images.device)
        rows = view.view(count * height, width * channels)
        torch.addcmul(shift, rows, scale, out=rows)
        return view.permute(0, 3, 1, 2)


@lru_cache(maxsize=8)
def _mirrored(width: int, device: torch.device) -> Tensor:
    """Source columns [2, w] of an image that stays as it is, and of one that is mirrored."""
    return image_ops.flip_columns(torch.tensor([False, True], device=device), width)


@lru_cache(maxsize=8)
def _reflected(padding: int, side: int, device: torch.device) -> Tensor:
    """Source rows or columns [2 * padding + 1, side] of every window there is."""
    return image_ops.reflected_span(torch.arange(2 * padding + 1, device=device), padding, side)


@lru_cache(maxsize=8)
def _row_constants(
    mean: tuple[float, ...], std: tuple[float, ...], width: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Factor and summand of normalisation for one row of interleaved channels, [w * c] each."""
    scale, shift = channel_constants(mean, std)
    return scale.repeat(width).to(device), shift.repeat(width).to(device)


def channel_constants(mean: Sequence[float], std: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Factor and summand that normalise the levels 0 to 255 of each channel, [c] each."""
    centre = torch.tensor(mean, dtype=torch.float64)
    spread = torch.tensor(std, dtype=torch.float64)
    return (1 / (255 * spread)).float(), (-centre / spread).float()

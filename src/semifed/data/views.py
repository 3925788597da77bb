"""What a network sees of an image: plain, weakly and strongly augmented views, drawn and computed for whole batches.

Every random step first draws its parameters (`draw`), then applies them (`apply`), so that the parameters can be
inspected and given to another implementation.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from semifed.data import image_ops
from semifed.errors import UserError, nearest

# Operations that share a kernel are neighbours: tables, affine maps, blends. Colour is last because images of one
# channel draw from the pool without it.
OPERATIONS = (
    "identity",
    "posterize",
    "solarize",
    "brightness",
    "contrast",
    "autocontrast",
    "equalize",
    "shear_x",
    "shear_y",
    "translate_x",
    "translate_y",
    "rotate",
    "sharpness",
    "color",
)
_INDEX = {name: index for index, name in enumerate(OPERATIONS)}
# The first operation of each group that is served in one go.
_GROUPS = ("identity", "posterize", "contrast", "autocontrast", "equalize", "shear_x", "sharpness", "color")
_LEVELS = range(1, 10)
_CODES = 2 * len(_LEVELS)  # numbers an operation takes when level and sign are written into one
_SIGNS = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(len(_LEVELS))
# A table of all affine sources costs 720 bytes a pixel; beyond this size they are computed for each batch.
_TABLE_PIXELS = 64 * 64
_GREY = 127
_NO_STEP = "none"


def posterize_bits(level: int) -> int:
    """Bits kept by posterize: 4 to 7 for levels 1 to 9."""
    return 4 + 2 * level // 5


def solarize_threshold(level: int) -> int:
    """Lowest inverted level of solarize: 231 down to 26 for levels 1 to 9."""
    return 256 - 128 * level // 5


def enhance_factor(level: int) -> float:
    """Factor of brightness, color, contrast and sharpness: 0.14 to 0.86 for levels 1 to 9, never above 1."""
    return 0.9 * level / 10 + 0.05


def shear_amount(level: int) -> float:
    """Shear without its sign: 0.03 a level."""
    return 0.3 * level / 10


def translate_pixels(level: int, side: int) -> int:
    """Translation without its sign: 3 % of the side a level, cut to whole pixels."""
    return 3 * level * side // 100


def rotate_degrees(level: int) -> int:
    """Rotation without its sign: 3 degrees a level."""
    return 3 * level


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
        return Window(rows, image_ops.flip_columns(self.mask, width))


@dataclass(frozen=True, eq=False)
class CropDraw:
    """Where each window lies in the padded image."""

    padding: int
    top: Tensor  # [n], 0 to 2 * padding
    left: Tensor

    def window(self, height: int, width: int) -> Window:
        """Where the pixels inside the window come from."""
        return Window(
            image_ops.reflected_span(self.top, self.padding, height),
            image_ops.reflected_span(self.left, self.padding, width),
        )


@dataclass(frozen=True, eq=False)
class RandAugmentDraw:
    """The operations of each sample, one column a turn; those not `applied` leave the image as it is."""

    operations: Tensor  # [n, turns], index into OPERATIONS
    levels: Tensor  # [n, turns], 1 to 9
    negative: Tensor  # bool [n, turns], the sign of shears, translations and rotations
    applied: Tensor  # bool [n, turns]

    def apply(self, images: Tensor) -> Tensor:
        """The augmented images, turn after turn."""
        # One number says operation, level and sign: it sorts the samples and indexes every table of parameters.
        codes = (self.operations * _CODES + (self.levels - 1) * 2 + self.negative) * self.applied
        codes, orders = codes.T.contiguous().sort()
        starts = torch.tensor([_CODES * _INDEX[name] for name in _GROUPS], device=images.device)
        starts = torch.searchsorted(codes, starts.repeat(len(codes), 1))
        sizes = starts.diff(append=starts.new_full((len(codes), 1), len(images))).tolist()
        for turn in range(len(codes)):
            images = _one_turn(images, orders[turn], codes[turn], sizes[turn])
        return images


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
        return FlipDraw(_integers(0, 2, (len(images),), images, generator).bool())


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
        top, left = _integers(0, 2 * self.pixels + 1, (2, len(images)), images, generator)
        return CropDraw(self.pixels, top, left)


@dataclass(frozen=True)
class RandAugment:
    """RandAugment as FixMatch uses it: `count` operations with replacement, each applied with probability one half.

    Levels are uniform on 1 ... magnitude - 1; the upper end itself is never drawn.
    """

    count: int
    magnitude: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError("count must be at least 1")
        if not 2 <= self.magnitude <= 10:
            raise ValueError("magnitude must be from 2 to 10")

    def draw(self, images: Tensor, generator: torch.Generator) -> RandAugmentDraw:
        """Operation, level, sign and whether it is applied, for each sample and turn."""
        channels = images.shape[1]
        if channels not in (1, 3):
            raise UserError(f"views: randaugment needs images of 1 or 3 channels; these have {channels}")
        pool = len(OPERATIONS) if channels == 3 else _INDEX["color"]
        size = (len(images), self.count)
        negative, applied = _integers(0, 2, (2, *size), images, generator).bool()
        return RandAugmentDraw(
            operations=_integers(0, pool, size, images, generator),
            levels=_integers(1, self.magnitude, size, images, generator),
            negative=negative,
            applied=applied,
        )


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
        """Each image mirrored with probability one half and nothing else: the second weak view of SSB."""
        return self._view((Flip(),), images, generator)

    def _view(self, steps: tuple[Step, ...], images: Tensor, generator: torch.Generator) -> Tensor:
        self._checked(images)
        return self._normalised(apply(draw(steps, images, generator), images, fill=self.fill))

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


def _integers(low: int, high: int, size: tuple[int, ...], images: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform integers low ... high - 1, drawn where the generator lives, returned where the images are."""
    return torch.randint(low, high, size, generator=generator, device=generator.device).to(images.device)


def _one_turn(images: Tensor, order: Tensor, codes: Tensor, sizes: list[int]) -> Tensor:
    """Apply one operation to each sample; samples are sorted by code, so each kernel works on one slice."""
    images = images.index_select(0, order)
    idle, fixed, contrast, auto, equal, moved, sharp, colour = images.split_with_sizes(sizes)
    _, fixed_code, contrast_code, _, _, moved_code, sharp_code, colour_code = codes.split_with_sizes(sizes)
    factors = _factors(images.device)
    tables = []
    if len(fixed):
        tables.append(_fixed_tables(images.device).index_select(0, fixed_code)[:, None])
    if len(contrast):
        tables.append(image_ops.contrast_table(contrast, factors[contrast_code])[:, None])
    if len(auto):
        tables.append(image_ops.autocontrast_table(auto))
    if len(equal):
        tables.append(image_ops.equalize_table(equal))
    parts = [idle]
    if tables:
        looked_up = images[len(idle) : len(idle) + sum(map(len, tables))]
        table = torch.cat([table.expand(-1, images.shape[1], -1) for table in tables])
        parts.append(image_ops.look_up(looked_up, table))
    if len(moved):
        parts.append(image_ops.resample(moved, _sources(moved_code, moved)))
    if len(sharp):
        parts.append(image_ops.sharpness(sharp, factors[sharp_code]))
    if len(colour):
        parts.append(image_ops.color(colour, factors[colour_code]))
    return torch.cat(parts).index_select(0, order.argsort())


def _sources(codes: Tensor, images: Tensor) -> Tensor:
    """Source pixels [k, h * w] of samples whose operation is an affine map."""
    height, width = images.shape[2:]
    rows = codes - _CODES * _INDEX["shear_x"]
    if height * width <= _TABLE_PIXELS:
        return _source_table(height, width, images.device).index_select(0, rows)
    return image_ops.source_pixels(_matrices(height, width, images.device)[rows], height, width)


@lru_cache(maxsize=8)
def _factors(device: torch.device) -> Tensor:
    """Enhancement factor by code, whatever the operation."""
    return _by_code(enhance_factor).float().repeat(len(OPERATIONS)).to(device)


@lru_cache(maxsize=8)
def _fixed_tables(device: torch.device) -> Tensor:
    """Tables [codes, 256] of the operations that do not depend on the image."""
    identity = image_ops.identity_table(torch.device("cpu")).expand(_CODES, 256)
    posterize = image_ops.posterize_table(_by_code(posterize_bits))
    solarize = image_ops.solarize_table(_by_code(solarize_threshold))
    brightness = image_ops.brightness_table(_by_code(enhance_factor))
    return torch.cat((identity, posterize, solarize, brightness)).to(device)


@lru_cache(maxsize=8)
def _matrices(height: int, width: int, device: torch.device) -> Tensor:
    """Affine maps [codes, 6], from shear_x on."""
    shear = _SIGNS * _by_code(shear_amount)
    return torch.cat(
        (
            image_ops.shear_x_matrix(shear),
            image_ops.shear_y_matrix(shear),
            image_ops.translate_x_matrix(_SIGNS * _by_code(lambda level: translate_pixels(level, width))),
            image_ops.translate_y_matrix(_SIGNS * _by_code(lambda level: translate_pixels(level, height))),
            image_ops.rotate_matrix(_SIGNS * _by_code(rotate_degrees), height, width),
        )
    ).to(device)


def _by_code(parameter: Callable[[int], float]) -> Tensor:
    """The parameter of each of the codes of one operation, without its sign."""
    return torch.tensor([parameter(level) for level in _LEVELS for _ in range(2)], dtype=torch.float64)


@lru_cache(maxsize=8)
def _source_table(height: int, width: int, device: torch.device) -> Tensor:
    return image_ops.source_pixels(_matrices(height, width, device), height, width)


@lru_cache(maxsize=8)
def _row_constants(
    mean: tuple[float, ...], std: tuple[float, ...], width: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Factor and summand of normalisation for one row of interleaved channels, [w * c] each."""
    centre = torch.tensor(mean, dtype=torch.float64)
    spread = torch.tensor(std, dtype=torch.float64)
    scale, shift = 1 / (255 * spread), -centre / spread
    return scale.float().repeat(width).to(device), shift.float().repeat(width).to(device)

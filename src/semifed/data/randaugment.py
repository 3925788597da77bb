"""RandAugment as FixMatch uses it, for whole batches: each sample its own operations, levels and signs."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from semifed.data import image_ops
from semifed.errors import UserError

MOST_TURNS = 20  # more operations on one image leave nothing of it
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
        starts = torch.searchsorted(codes, _first_codes(len(codes), images.device)).tolist()
        for turn, order, back, cuts in zip(codes, orders, orders.argsort(), starts, strict=True):
            sizes = [later - start for start, later in pairwise([*cuts, len(images)])]
            images = _one_turn(images, order, turn, sizes).index_select(0, back)
        return images


@dataclass(frozen=True)
class RandAugment:
    """RandAugment as FixMatch uses it: `count` operations with replacement, each applied with probability one half.

    Levels are uniform on 1 ... magnitude - 1; the upper end itself is never drawn.
    """

    count: int
    magnitude: int

    def __post_init__(self) -> None:
        if not 1 <= self.count <= MOST_TURNS:
            raise ValueError(f"count must be from 1 to {MOST_TURNS}")
        if not 2 <= self.magnitude <= 10:
            raise ValueError("magnitude must be from 2 to 10")

    def draw(self, images: Tensor, generator: torch.Generator) -> RandAugmentDraw:
        """Operation, level, sign and whether it is applied, for each sample and turn."""
        channels = images.shape[1]
        if channels not in (1, 3):
            raise UserError(f"views: randaugment needs images of 1 or 3 channels; these have {channels}")
        pool = len(OPERATIONS) if channels == 3 else _INDEX["color"]
        size = (len(images), self.count)
        negative, applied = integers(0, 2, (2, *size), images, generator).bool()
        return RandAugmentDraw(
            operations=integers(0, pool, size, images, generator),
            levels=integers(1, self.magnitude, size, images, generator),
            negative=negative,
            applied=applied,
        )


def integers(low: int, high: int, size: tuple[int, ...], images: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform integers low ... high - 1, drawn where the generator lives, returned where the images are."""
    return torch.randint(low, high, size, generator=generator, device=generator.device).to(images.device)


def _one_turn(images: Tensor, order: Tensor, codes: Tensor, sizes: list[int]) -> Tensor:
    """Apply one operation to each sample; they come out sorted by code, so that each kernel works on one slice."""
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
    return torch.cat(parts)


def _sources(codes: Tensor, images: Tensor) -> Tensor:
    """Source pixels [k, h * w] of samples whose operation is an affine map."""
    height, width = images.shape[2:]
    rows = codes - _CODES * _INDEX["shear_x"]
    if height * width <= _TABLE_PIXELS:
        return _source_table(height, width, images.device).index_select(0, rows)
    return image_ops.source_pixels(_matrices(height, width, images.device)[rows], height, width)


@lru_cache(maxsize=8)
def _first_codes(turns: int, device: torch.device) -> Tensor:
    """The first code of each group, [turns, groups]."""
    return torch.tensor([_CODES * _INDEX[name] for name in _GROUPS], device=device).repeat(turns, 1)


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

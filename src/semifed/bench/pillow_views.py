"""Views as papers' code makes them: one image after the other, with Pillow.

What is done to an image is the same as in `semifed.data.views`; only the order of the work differs.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageEnhance, ImageOps
from torch import Tensor

from semifed.data.randaugment import (
    RandAugment,
    enhance_factor,
    posterize_bits,
    rotate_degrees,
    shear_amount,
    solarize_threshold,
    translate_pixels,
)
from semifed.data.views import Crop, Cutout, Flip, Step, Views
from semifed.rng import numpy_stream

Operation = Callable[[Image.Image, int, int], Image.Image]  # picture, level 1 to 9, sign


def _moved(picture: Image.Image, *matrix: float) -> Image.Image:
    return picture.transform(picture.size, Image.Transform.AFFINE, matrix)


OPERATIONS: Mapping[str, Operation] = {
    "identity": lambda picture, level, sign: picture,
    "posterize": lambda picture, level, sign: ImageOps.posterize(picture, posterize_bits(level)),
    "solarize": lambda picture, level, sign: ImageOps.solarize(picture, solarize_threshold(level)),
    "brightness": lambda picture, level, sign: ImageEnhance.Brightness(picture).enhance(enhance_factor(level)),
    "contrast": lambda picture, level, sign: ImageEnhance.Contrast(picture).enhance(enhance_factor(level)),
    "autocontrast": lambda picture, level, sign: ImageOps.autocontrast(picture),
    "equalize": lambda picture, level, sign: ImageOps.equalize(picture),
    "shear_x": lambda picture, level, sign: _moved(picture, 1, sign * shear_amount(level), 0, 0, 1, 0),
    "shear_y": lambda picture, level, sign: _moved(picture, 1, 0, 0, sign * shear_amount(level), 1, 0),
    "translate_x": lambda picture, level, sign: _moved(
        picture, 1, 0, sign * translate_pixels(level, picture.width), 0, 1, 0
    ),
    "translate_y": lambda picture, level, sign: _moved(
        picture, 1, 0, 0, 0, 1, sign * translate_pixels(level, picture.height)
    ),
    "rotate": lambda picture, level, sign: picture.rotate(sign * rotate_degrees(level)),
    "sharpness": lambda picture, level, sign: ImageEnhance.Sharpness(picture).enhance(enhance_factor(level)),
    "color": lambda picture, level, sign: ImageEnhance.Color(picture).enhance(enhance_factor(level)),
}
_NAMES = tuple(OPERATIONS)
_COLOURLESS_NAMES = tuple(name for name in OPERATIONS if name != "color")


def pool(picture: Image.Image) -> tuple[str, ...]:
    """The operations that can change a picture; a grey one has no colour."""
    return _COLOURLESS_NAMES if picture.mode == "L" else _NAMES


class PillowViews:
    """Weak and strong views of one image at a time: uint8 [c, h, w] to normalised float32 [c, h, w]."""

    def __init__(self, views: Views, seed: int = 0) -> None:
        self._weak, self._strong, self._fill = views.weak_steps, views.strong_steps, views.fill
        self._mean = torch.tensor(views.mean)[:, None, None]
        self._std = torch.tensor(views.std)[:, None, None]
        self._random = numpy_stream(seed, "Pillow views")

    def weak(self, image: Tensor) -> Tensor:
        """A weak view."""
        return self._view(self._weak, image)

    def strong(self, image: Tensor) -> Tensor:
        """A strong view."""
        return self._view(self._strong, image)

    def _view(self, steps: Sequence[Step], image: Tensor) -> Tensor:
        picture = as_picture(image)
        for step in steps:
            match step:
                case Flip():
                    if self._random.random() < 0.5:
                        picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
                case Crop(pixels):
                    picture = self._cropped(picture, pixels)
                case RandAugment(count, magnitude):
                    picture = self._augmented(picture, count, magnitude)
                case Cutout(size):
                    picture = self._covered(picture, size)
        return as_tensor(picture).float().div(255).sub_(self._mean).div_(self._std)

    def _cropped(self, picture: Image.Image, padding: int) -> Image.Image:
        levels = np.asarray(picture)
        around = [(padding, padding), (padding, padding), (0, 0)][: levels.ndim]
        padded = Image.fromarray(np.pad(levels, around, mode="reflect"))
        left, top = self._random.integers(2 * padding + 1, size=2).tolist()
        return padded.crop((left, top, left + picture.width, top + picture.height))

    def _augmented(self, picture: Image.Image, count: int, magnitude: int) -> Image.Image:
        names = pool(picture)
        for _ in range(count):
            name = names[self._random.integers(len(names))]
            level, sign = int(self._random.integers(1, magnitude)), 1 if self._random.random() < 0.5 else -1
            if self._random.random() < 0.5:
                picture = OPERATIONS[name](picture, level, sign)
        return picture

    def _covered(self, picture: Image.Image, size: int) -> Image.Image:
        centre = (self._random.random() * picture.width, self._random.random() * picture.height)
        left, top = (int(max(0.0, at - size / 2)) for at in centre)
        box = (left, top, min(picture.width, left + size), min(picture.height, top + size))
        picture = picture.copy()
        ImageDraw.Draw(picture).rectangle(box, self._fill if picture.mode == "L" else (self._fill,) * 3)
        return picture


def as_picture(image: Tensor) -> Image.Image:
    """A picture of an image, uint8 [c, h, w]."""
    levels = image.permute(1, 2, 0).numpy()
    return Image.fromarray(levels[..., 0] if levels.shape[2] == 1 else levels)


def as_tensor(picture: Image.Image) -> Tensor:
    """The levels of a picture, uint8 [c, h, w]."""
    levels = np.array(picture).reshape(picture.height, picture.width, -1)
    return torch.from_numpy(levels).permute(2, 0, 1).contiguous()

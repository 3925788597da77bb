"""Every operation against Pillow, pixel for pixel, on real images."""

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageEnhance, ImageOps
from sklearn.datasets import load_digits, load_sample_image
from torch import Tensor

from semifed.data import image_ops

PillowOperation = Callable[[Image.Image, float], Image.Image]


@lru_cache
def real_images(kind: str) -> Tensor:
    """Photographs and digits as uint8 [n, c, h, w]."""
    channels, height, width = {
        "colour": (3, 32, 32),
        "grey": (1, 28, 28),
        "wide": (3, 20, 33),
        "tall": (1, 31, 14),
        "small": (1, 8, 8),
    }[kind]
    pictures = []
    for name in ("china.jpg", "flower.jpg"):
        picture = Image.fromarray(load_sample_image(name))
        for left, top in ((0, 0), (150, 120), (320, 200), (505, 330)):
            # Half the crops are shrunk first: whole scenes have other histograms than plain patches.
            scale = 1 if left % 100 == 0 else 4
            crop = picture.crop((left, top, left + scale * width, top + scale * height)).resize((width, height))
            pictures.append(crop.convert("L") if channels == 1 else crop)
    for digit in load_digits().images[:4]:
        grey = Image.fromarray((digit * 255 / 16).astype(np.uint8)).resize((width, height))
        pictures.append(grey if channels == 1 else grey.convert("RGB"))
    return torch.stack([from_pillow(picture) for picture in pictures])


def from_pillow(picture: Image.Image) -> Tensor:
    levels = np.array(picture)
    return torch.from_numpy(levels.reshape(picture.height, picture.width, -1)).permute(2, 0, 1)


def to_pillow(image: Tensor) -> Image.Image:
    levels = image.permute(1, 2, 0).numpy()
    return Image.fromarray(np.ascontiguousarray(levels[..., 0] if levels.shape[2] == 1 else levels))


def by_pillow(operation: PillowOperation, images: Tensor, parameter: Tensor) -> Tensor:
    results = [
        from_pillow(operation(to_pillow(image), value)) for image, value in zip(images, parameter.tolist(), strict=True)
    ]
    return torch.stack(results)


def crossed(images: Tensor, values: list[float]) -> tuple[Tensor, Tensor]:
    """Every image with every value, mixed in one batch."""
    parameter = torch.tensor(values).repeat(len(images))
    return images.repeat_interleave(len(values), 0), parameter


def affine(
    *, shear_x: float = 0, shear_y: float = 0, x: float = 0, y: float = 0
) -> Callable[[Image.Image], Image.Image]:
    matrix = (1, shear_x, x, shear_y, 1, y)
    return lambda picture: picture.transform(picture.size, Image.Transform.AFFINE, matrix)


def enhance(kind: Callable[[Image.Image], ImageEnhance._Enhance]) -> PillowOperation:
    return lambda picture, factor: kind(picture).enhance(factor)


LEVELS = range(1, 10)
SIGNED = [sign * level for level in LEVELS for sign in (1, -1)]
FACTORS = [0.14, 0.23, 0.32, 0.41, 0.50, 0.59, 0.68, 0.77, 0.86]
KINDS = ["colour", "grey", "wide", "tall", "small"]

OPERATIONS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], PillowOperation, list[float]]] = {
    "posterize": (image_ops.posterize, lambda p, v: ImageOps.posterize(p, int(v)), [1, 2, 3, 4, 5, 6, 7, 8]),
    "solarize": (
        image_ops.solarize,
        lambda p, v: ImageOps.solarize(p, int(v)),
        [231, 205, 180, 154, 128, 103, 77, 52, 26, 0, 256],
    ),
    "brightness": (image_ops.brightness, enhance(ImageEnhance.Brightness), FACTORS),
    "contrast": (image_ops.contrast, enhance(ImageEnhance.Contrast), FACTORS),
    "sharpness": (image_ops.sharpness, enhance(ImageEnhance.Sharpness), FACTORS),
    "color": (image_ops.color, enhance(ImageEnhance.Color), FACTORS),
    "shear_x": (image_ops.shear_x, lambda p, v: affine(shear_x=v)(p), [0.03 * v for v in SIGNED]),
    "shear_y": (image_ops.shear_y, lambda p, v: affine(shear_y=v)(p), [0.03 * v for v in SIGNED]),
    "translate_x": (image_ops.translate_x, lambda p, v: affine(x=v)(p), [0, *SIGNED]),
    "translate_y": (image_ops.translate_y, lambda p, v: affine(y=v)(p), [0, *SIGNED]),
    "rotate": (image_ops.rotate, lambda p, v: p.rotate(v), [3 * v for v in SIGNED]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_level_equals_pillow(name: str, kind: str) -> None:
    operation, oracle, values = OPERATIONS[name]
    images, parameter = crossed(real_images(kind), values)
    before = images.clone()
    result = operation(images, parameter)
    assert result.dtype == torch.uint8
    assert torch.equal(result, by_pillow(oracle, images, parameter))
    assert torch.equal(images, before)


@pytest.mark.parametrize("kind", KINDS)
def test_autocontrast_and_equalize_equal_pillow(kind: str) -> None:
    images = real_images(kind)
    # Flat and two-level images are where both operations have special cases.
    flat = torch.full_like(images[:3], 90)
    flat[1, :, 0] = 91
    flat[2, :, :, ::2] = 200
    images = torch.cat((images, images // 3 + 40, flat))
    nothing = torch.zeros(len(images))
    stretched = by_pillow(lambda p, _: ImageOps.autocontrast(p), images, nothing)
    equalized = by_pillow(lambda p, _: ImageOps.equalize(p), images, nothing)
    assert torch.equal(image_ops.autocontrast(images), stretched)
    assert torch.equal(image_ops.equalize(images), equalized)


def test_autocontrast_is_exact_for_every_pair_of_extremes() -> None:
    low, high = torch.triu_indices(256, 256, offset=1)
    some = torch.arange(0, len(low), 7)
    ramp = torch.arange(256).clamp(low[some, None], high[some, None]).to(torch.uint8)
    result = image_ops.autocontrast(ramp.view(-1, 1, 16, 16)).view(-1, 256)
    for row, bottom, top in zip(result.tolist(), low[some].tolist(), high[some].tolist(), strict=True):
        scale = 255.0 / (top - bottom)
        expected = [min(max(int(level * scale + -bottom * scale), 0), 255) for level in range(bottom, top + 1)]
        assert row[bottom : top + 1] == expected


@pytest.mark.parametrize("name", ["brightness", "contrast", "sharpness", "color"])
@given(factor=st.floats(-2, 4, width=32))
@settings(max_examples=25, deadline=None)
def test_enhancers_equal_pillow_at_any_factor(name: str, factor: float) -> None:
    operation, oracle, _ = OPERATIONS[name]
    images, parameter = crossed(real_images("colour")[1:6], [factor, 0.0, 1.0])
    assert torch.equal(operation(images, parameter), by_pillow(oracle, images, parameter))


@given(degrees=st.one_of(st.floats(-400, 400), st.sampled_from([-180, -90, 0, 45, 90, 180, 270])))
@settings(max_examples=40, deadline=None)
def test_rotation_equals_pillow_at_any_angle(degrees: float) -> None:
    images, parameter = crossed(real_images("colour")[:2], [degrees])
    parameter = parameter.double()
    expected = by_pillow(lambda picture, value: picture.rotate(value), images, parameter)
    assert torch.equal(image_ops.rotate(images, parameter), expected)


@given(
    seed=st.integers(0, 2**31), channels=st.sampled_from([1, 3]), height=st.integers(3, 12), width=st.integers(3, 12)
)
@settings(max_examples=40, deadline=None)
def test_noise_of_any_shape_equals_pillow(seed: int, channels: int, height: int, width: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (3, channels, height, width), generator=generator, dtype=torch.uint8)
    for name, (operation, oracle, values) in OPERATIONS.items():
        if name == "color" and channels == 1:
            continue
        parameter = torch.tensor(values)[torch.randint(len(values), (3,), generator=generator)]
        assert torch.equal(operation(images, parameter), by_pillow(oracle, images, parameter)), name


def test_equalize_of_large_images_equals_pillow() -> None:
    picture = Image.fromarray(load_sample_image("china.jpg")).resize((96, 64))
    images = from_pillow(picture)[None]
    assert torch.equal(image_ops.equalize(images)[0], from_pillow(ImageOps.equalize(picture)))


def test_luminance_equals_pillow() -> None:
    images = real_images("colour")
    grey = torch.cat([from_pillow(to_pillow(image).convert("L")) for image in images])
    assert torch.equal(image_ops.luminance(images), grey.int())


def test_images_too_small_to_smooth_stay_as_in_pillow() -> None:
    images = real_images("colour")[:, :, :2, :5]
    factor = torch.full((len(images),), 0.3)
    assert torch.equal(image_ops.sharpness(images, factor), images)
    assert torch.equal(by_pillow(enhance(ImageEnhance.Sharpness), images, factor), images)


@pytest.mark.parametrize("kind", KINDS)
def test_flip_mirrors_only_where_asked(kind: str) -> None:
    images = real_images(kind)
    mask = torch.arange(len(images)) % 3 == 0
    expected = [np.flip(i, 2) if m else i for i, m in zip(images.numpy(), mask.tolist(), strict=True)]
    assert np.array_equal(image_ops.flip(images, mask).numpy(), np.stack(expected))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padding", [1, 4, 7])
def test_crop_equals_numpy_reflection_at_every_offset(kind: str, padding: int) -> None:
    image = real_images(kind)[2]
    _, height, width = image.shape
    top, left = torch.cartesian_prod(torch.arange(2 * padding + 1), torch.arange(2 * padding + 1)).T
    padded = np.pad(image.numpy(), ((0, 0), (padding, padding), (padding, padding)), mode="reflect")
    expected = [padded[:, y : y + height, x : x + width] for y, x in zip(top.tolist(), left.tolist(), strict=True)]
    result = image_ops.crop(image.expand(len(top), -1, -1, -1), top, left, padding)
    assert np.array_equal(result.numpy(), np.stack(expected))


def test_crop_refuses_padding_as_large_as_the_image() -> None:
    with pytest.raises(ValueError, match="reflect padding 8 must be smaller than the sides, which are 8x8"):
        image_ops.crop(real_images("small"), torch.zeros(12).long(), torch.zeros(12).long(), 8)


def painted_by_pillow(image: Tensor, cx: float, cy: float, size: int, fill: int) -> Tensor:
    picture = to_pillow(image)
    width, height = picture.size
    x0, y0 = int(max(0, cx - size / 2)), int(max(0, cy - size / 2))
    box = (x0, y0, int(min(width, x0 + size)), int(min(height, y0 + size)))
    ImageDraw.Draw(picture).rectangle(box, (fill,) * len(image) if len(image) > 1 else fill)
    return from_pillow(picture)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 5, 14, 16])
def test_cutout_equals_pillow_all_over_the_image(kind: str, size: int) -> None:
    image = real_images(kind)[0]
    _, height, width = image.shape
    along_x = torch.tensor([0.0, 0.99, 7.5, 8.0, 8.49, width / 2, width - 8.0, width - 0.01], dtype=torch.float64)
    along_y = torch.tensor([0.0, 2.51, 6.99, 7.0, height / 3, height - 1.0, height - 0.01], dtype=torch.float64)
    cx, cy = torch.cartesian_prod(along_x, along_y).T
    result = image_ops.cutout(image.expand(len(cx), -1, -1, -1), cx, cy, size, 127)
    for painted, x, y in zip(result, cx.tolist(), cy.tolist(), strict=True):
        assert torch.equal(painted, painted_by_pillow(image, x, y, size, 127))


def test_cutout_moves_inside_at_the_left_and_is_cut_off_at_the_right() -> None:
    black = torch.zeros(4, 3, 32, 32, dtype=torch.uint8)
    cx = torch.tensor([0.0, 31.9, 16.0, 16.0])
    cy = torch.tensor([16.0, 16.0, 0.0, 31.9])
    painted = image_ops.cutout(black, cx, cy, 16, 255)[:, 0] == 255
    areas = painted.sum((1, 2)).tolist()
    assert areas == [17 * 17, 9 * 17, 17 * 17, 17 * 9]
    assert painted[0, 8:25, :17].all()
    assert painted[1, 8:25, 23:].all()


@pytest.mark.parametrize("count", [0, 1])
def test_empty_and_single_batches(count: int) -> None:
    images = real_images("colour")[:count]
    for name, (operation, _, values) in OPERATIONS.items():
        parameter = torch.tensor(values[:1]).expand(count)
        assert operation(images, parameter).shape == images.shape, name
    offset = torch.zeros(count, dtype=torch.long)
    centre = torch.zeros(count)
    for result in (
        image_ops.autocontrast(images),
        image_ops.equalize(images),
        image_ops.flip(images, offset.bool()),
        image_ops.crop(images, offset, offset, 4),
        image_ops.cutout(images, centre, centre, 16, 127),
    ):
        assert result.shape == images.shape
        assert result.dtype == torch.uint8


@pytest.mark.parametrize("name", OPERATIONS)
def test_memory_format_of_the_input_does_not_matter(name: str) -> None:
    operation, _, values = OPERATIONS[name]
    images, parameter = crossed(real_images("wide")[:3], values)
    interleaved = images.contiguous(memory_format=torch.channels_last)
    assert torch.equal(operation(interleaved, parameter), operation(images, parameter))

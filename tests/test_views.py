"""Views: draws against their distributions, whole pipelines against Pillow, the small language of steps."""

from dataclasses import replace
from functools import lru_cache
from typing import TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageEnhance, ImageOps
from scipy.stats import chisquare, kstest
from sklearn.datasets import load_sample_image
from torch import Tensor

from semifed.data import randaugment, views
from semifed.data.randaugment import OPERATIONS, RandAugment, RandAugmentDraw
from semifed.data.views import Crop, CropDraw, Cutout, CutoutDraw, Draw, Flip, FlipDraw, Views
from semifed.errors import UserError

STRONG = "flip crop(4) randaugment(2,10) cutout(16)"
COLOUR = Views.parse("flip crop(4)", STRONG, mean=(0.4914, 0.4822, 0.4465), std=(0.2471, 0.2435, 0.2616))
GREY = Views.parse("flip crop(2)", "flip crop(2) randaugment(2,10) cutout(14)", mean=[0.2860], std=[0.3530])

# Written out from the table of RandAugment-MC, levels 1 to 9.
POSTERIZE_BITS = [4, 4, 5, 5, 6, 6, 6, 7, 7]
SOLARIZE_THRESHOLDS = [231, 205, 180, 154, 128, 103, 77, 52, 26]
FACTORS = [0.14, 0.23, 0.32, 0.41, 0.50, 0.59, 0.68, 0.77, 0.86]
SHEARS = [0.03, 0.06, 0.09, 0.12, 0.15, 0.18, 0.21, 0.24, 0.27]
DEGREES = [3, 6, 9, 12, 15, 18, 21, 24, 27]
TRANSLATIONS_32 = [0, 1, 2, 3, 4, 5, 6, 7, 8]

AnyDraw = TypeVar("AnyDraw", FlipDraw, CropDraw, RandAugmentDraw, CutoutDraw)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@lru_cache
def photographs(count: int, channels: int, height: int, width: int) -> Tensor:
    """Patches of two photographs, uint8 [n, c, h, w]."""
    rng = np.random.default_rng(3)
    pictures = [Image.fromarray(load_sample_image(name)) for name in ("china.jpg", "flower.jpg")]
    patches = []
    for index in range(count):
        picture = pictures[index % 2]
        left, top = int(rng.integers(picture.width - 3 * width)), int(rng.integers(picture.height - 3 * height))
        patch = picture.crop((left, top, left + 3 * width, top + 3 * height)).resize((width, height))
        levels = np.array(patch.convert("L") if channels == 1 else patch).reshape(height, width, channels)
        patches.append(torch.from_numpy(levels).permute(2, 0, 1))
    return torch.stack(patches)


def blank(count: int, channels: int = 3, height: int = 32, width: int = 32) -> Tensor:
    return torch.zeros(count, channels, height, width, dtype=torch.uint8)


def only(kind: type[AnyDraw], draws: tuple[Draw, ...]) -> AnyDraw:
    (found,) = [draw for draw in draws if isinstance(draw, kind)]
    return found


# --- whole pipelines against Pillow -------------------------------------------------------------------------------


def augmented_by_pillow(picture: Image.Image, name: str, level: int, negative: bool) -> Image.Image:
    sign = -1 if negative else 1
    width, height = picture.size

    def moved(*matrix: float) -> Image.Image:
        return picture.transform(picture.size, Image.Transform.AFFINE, matrix)

    match name:
        case "identity":
            return picture
        case "autocontrast":
            return ImageOps.autocontrast(picture)
        case "equalize":
            return ImageOps.equalize(picture)
        case "posterize":
            return ImageOps.posterize(picture, POSTERIZE_BITS[level - 1])
        case "solarize":
            return ImageOps.solarize(picture, SOLARIZE_THRESHOLDS[level - 1])
        case "brightness":
            return ImageEnhance.Brightness(picture).enhance(FACTORS[level - 1])
        case "contrast":
            return ImageEnhance.Contrast(picture).enhance(FACTORS[level - 1])
        case "sharpness":
            return ImageEnhance.Sharpness(picture).enhance(FACTORS[level - 1])
        case "color":
            return ImageEnhance.Color(picture).enhance(FACTORS[level - 1])
        case "shear_x":
            return moved(1, sign * SHEARS[level - 1], 0, 0, 1, 0)
        case "shear_y":
            return moved(1, 0, 0, sign * SHEARS[level - 1], 1, 0)
        case "translate_x":
            return moved(1, 0, sign * int(SHEARS[level - 1] * width), 0, 1, 0)
        case "translate_y":
            return moved(1, 0, 0, 0, 1, sign * int(SHEARS[level - 1] * height))
        case "rotate":
            return picture.rotate(sign * DEGREES[level - 1])
    raise AssertionError(name)


def changed_by_pillow(image: Tensor, draws: tuple[Draw, ...], index: int, fill: int) -> Tensor:
    channels, height, width = image.shape
    levels = image.permute(1, 2, 0).numpy()
    picture = Image.fromarray(np.ascontiguousarray(levels[..., 0] if channels == 1 else levels))
    for draw in draws:
        match draw:
            case FlipDraw(mask):
                picture = ImageOps.mirror(picture) if mask[index] else picture
            case CropDraw(padding, top, left):
                around = [(padding, padding), (padding, padding)] + [(0, 0)] * (channels == 3)
                padded = Image.fromarray(np.pad(np.array(picture), around, mode="reflect"))
                x, y = int(left[index]), int(top[index])
                picture = padded.crop((x, y, x + width, y + height))
            case RandAugmentDraw(operations, drawn_levels, negative, applied):
                for turn in range(operations.shape[1]):
                    if applied[index, turn]:
                        name = OPERATIONS[int(operations[index, turn])]
                        level, minus = int(drawn_levels[index, turn]), bool(negative[index, turn])
                        picture = augmented_by_pillow(picture, name, level, minus)
            case CutoutDraw(size, cx, cy):
                picture = picture.copy()
                x0, y0 = int(max(0, float(cx[index]) - size / 2)), int(max(0, float(cy[index]) - size / 2))
                x1, y1 = int(min(width, x0 + size)), int(min(height, y0 + size))
                ImageDraw.Draw(picture).rectangle((x0, y0, x1, y1), fill if channels == 1 else (fill,) * 3)
    return torch.from_numpy(np.array(picture).reshape(height, width, channels)).permute(2, 0, 1)


@pytest.mark.parametrize(
    ("look", "shape", "fill"),
    [
        (COLOUR, (300, 3, 32, 32), 127),
        (GREY, (300, 1, 28, 28), 73),
        (COLOUR, (60, 3, 17, 30), 127),
        (GREY, (60, 1, 12, 8), 73),
        (COLOUR, (40, 3, 66, 70), 127),
    ],
)
def test_strong_views_equal_a_pillow_pipeline(look: Views, shape: tuple[int, int, int, int], fill: int) -> None:
    images = photographs(*shape)
    draws = views.draw(look.strong_steps, images, seeded(5))
    expected = [changed_by_pillow(image, draws, index, fill) for index, image in enumerate(images)]
    before = images.clone()
    assert torch.equal(views.apply(draws, images, fill=look.fill), torch.stack(expected))
    assert torch.equal(images, before)


@pytest.mark.parametrize("channels", [1, 3])
def test_every_operation_level_and_sign_equals_pillow(channels: int) -> None:
    names = [name for name in OPERATIONS if channels == 3 or name != "color"]
    grid = [(OPERATIONS.index(name), level, sign) for name in names for level in range(1, 10) for sign in (0, 1)]
    operations, levels, negative = torch.tensor(grid).T[:, :, None]
    draw = RandAugmentDraw(operations, levels, negative.bool(), torch.ones_like(operations).bool())
    images = photographs(len(grid), channels, 32, 32)
    expected = [changed_by_pillow(image, (draw,), index, 0) for index, image in enumerate(images)]
    different = (draw.apply(images) != torch.stack(expected)).flatten(1).any(1)
    assert [(names[g[0]], *g[1:]) for g, wrong in zip(grid, different, strict=True) if wrong] == []


def test_steps_run_in_the_order_they_are_written() -> None:
    images = photographs(30, 3, 32, 32)
    steps = views.parse_steps("cutout(8) randaugment(1,10) crop(3) flip crop(5)", key="views.weak")
    draws = views.draw(steps, images, seeded(1))
    assert [type(draw) for draw in draws] == [CutoutDraw, RandAugmentDraw, CropDraw, FlipDraw, CropDraw]
    expected = [changed_by_pillow(image, draws, index, 9) for index, image in enumerate(images)]
    assert torch.equal(views.apply(draws, images, fill=9), torch.stack(expected))


def test_operations_not_applied_leave_the_image() -> None:
    images = photographs(50, 3, 32, 32)
    drawn = RandAugment(2, 10).draw(images, seeded())
    idle = replace(drawn, applied=torch.zeros_like(drawn.applied))
    assert torch.equal(idle.apply(images), images)
    assert not torch.equal(drawn.apply(images), images)


@given(seed=st.integers(0, 2**31))
@settings(max_examples=15, deadline=None)
def test_permuting_images_and_draws_permutes_the_views(seed: int) -> None:
    images = photographs(40, 3, 32, 32)
    flip, crop, augment, cutout = views.draw(COLOUR.strong_steps, images, seeded(seed))
    assert isinstance(flip, FlipDraw)
    assert isinstance(crop, CropDraw)
    assert isinstance(augment, RandAugmentDraw)
    assert isinstance(cutout, CutoutDraw)
    order = torch.randperm(40, generator=seeded(seed + 1))
    permuted = (
        FlipDraw(flip.mask[order]),
        CropDraw(crop.padding, crop.top[order], crop.left[order]),
        RandAugmentDraw(
            augment.operations[order], augment.levels[order], augment.negative[order], augment.applied[order]
        ),
        CutoutDraw(cutout.size, cutout.cx[order], cutout.cy[order]),
    )
    together = views.apply((flip, crop, augment, cutout), images, fill=127)
    assert torch.equal(views.apply(permuted, images[order], fill=127), together[order])


# --- parameters of each level ---------------------------------------------------------------------------------------


def test_parameters_of_every_level_are_those_of_the_table() -> None:
    levels = range(1, 10)
    assert [randaugment.posterize_bits(v) for v in levels] == POSTERIZE_BITS
    assert [randaugment.solarize_threshold(v) for v in levels] == SOLARIZE_THRESHOLDS
    assert [randaugment.enhance_factor(v) for v in levels] == pytest.approx(FACTORS, abs=1e-12)
    assert [randaugment.shear_amount(v) for v in levels] == pytest.approx(SHEARS, abs=1e-12)
    assert [randaugment.rotate_degrees(v) for v in levels] == DEGREES
    assert [randaugment.translate_pixels(v, 32) for v in levels] == TRANSLATIONS_32
    assert [randaugment.translate_pixels(v, 100) for v in levels] == [3 * v for v in levels]
    assert [randaugment.translate_pixels(v, 8) for v in levels] == [0, 0, 0, 0, 1, 1, 1, 1, 2]


def test_fill_is_grey_for_colour_and_the_mean_for_one_channel() -> None:
    assert COLOUR.fill == 127
    assert GREY.fill == 73
    assert Views.parse("none", "none", mean=[1.2], std=[1.0]).fill == 255


# --- distributions ----------------------------------------------------------------------------------------------------


def assert_uniform(values: Tensor, expected_values: range) -> None:
    counts = torch.bincount(values.flatten().long(), minlength=expected_values.stop)
    assert counts.sum() == counts[expected_values.start :].sum()
    assert len(counts) == expected_values.stop
    assert chisquare(counts[expected_values.start :].numpy()).pvalue > 1e-4


@pytest.mark.parametrize(("channels", "pool"), [(3, 14), (1, 13)])
def test_randaugment_draws_uniformly(channels: int, pool: int) -> None:
    drawn = RandAugment(2, 10).draw(blank(40_000, channels, 1, 1), seeded(11))
    assert drawn.operations.shape == (40_000, 2)
    assert_uniform(drawn.operations, range(pool))
    assert_uniform(drawn.levels, range(1, 10))
    assert_uniform(drawn.negative, range(2))
    assert_uniform(drawn.applied, range(2))
    # Turns, levels, signs and coins are independent of each other.
    assert_uniform(drawn.operations[:, 0] * pool + drawn.operations[:, 1], range(pool * pool))
    assert_uniform((drawn.operations * 9 + drawn.levels - 1) * 4 + drawn.negative * 2 + drawn.applied, range(pool * 36))


def test_one_channel_never_draws_color() -> None:
    assert OPERATIONS[13] == "color"
    assert len(set(OPERATIONS)) == 14


@pytest.mark.parametrize("magnitude", [2, 5])
def test_magnitude_is_the_level_never_reached(magnitude: int) -> None:
    levels = RandAugment(3, magnitude).draw(blank(2_000, height=1, width=1), seeded()).levels
    assert levels.shape == (2_000, 3)
    assert levels.min() == 1
    assert levels.max() == magnitude - 1


def test_flips_are_fair_and_crops_uniform() -> None:
    images = blank(30_000, 1, 5, 6)
    flip, crop = views.draw((Flip(), Crop(4)), images, seeded(2))
    assert isinstance(flip, FlipDraw)
    assert isinstance(crop, CropDraw)
    assert_uniform(flip.mask, range(2))
    assert_uniform(crop.top * 9 + crop.left, range(81))


def test_cutout_centres_are_uniform_and_boxes_at_most_seventeen_wide() -> None:
    images = blank(4_000, 3, 32, 40)
    drawn = Cutout(16).draw(images, seeded(3))
    assert kstest(drawn.cx.numpy() / 40, "uniform").pvalue > 1e-3
    assert kstest(drawn.cy.numpy() / 32, "uniform").pvalue > 1e-3
    areas = drawn.apply(images, 1)[:, 0].flatten(1).long().sum(1)
    assert areas.max() == 17 * 17
    assert areas.min() >= 9 * 9
    assert (areas == 17 * 17).float().mean() == pytest.approx((24 / 32) * (32 / 40), abs=0.03)


def test_weak_and_strong_views_crop_independently() -> None:
    images = blank(64)
    generator = seeded()
    weak = only(CropDraw, views.draw(COLOUR.weak_steps, images, generator))
    strong = only(CropDraw, views.draw(COLOUR.strong_steps, images, generator))
    assert not torch.equal(weak.top, strong.top)


# --- views -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("look", "shape"), [(COLOUR, (9, 3, 32, 32)), (GREY, (9, 1, 12, 20))])
def test_plain_views_are_normalised(look: Views, shape: tuple[int, int, int, int]) -> None:
    images = photographs(*shape)
    mean, std = (np.array(values).reshape(1, -1, 1, 1) for values in (look.mean, look.std))
    expected = (images.numpy() / 255 - mean) / std
    assert np.allclose(look.plain(images).numpy(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("count", [0, 1, 7])
@pytest.mark.parametrize(("look", "shape"), [(COLOUR, (3, 8, 8)), (GREY, (1, 8, 8)), (COLOUR, (3, 10, 31))])
def test_views_keep_shape_and_are_float_channels_last(look: Views, shape: tuple[int, int, int], count: int) -> None:
    images = photographs(7, *shape)[:count]
    for view in (
        look.plain(images),
        look.weak(images, seeded()),
        look.strong(images, seeded()),
        look.flip(images, seeded()),
    ):
        assert view.shape == (count, *shape)
        assert view.dtype == torch.float32
        assert view.is_contiguous(memory_format=torch.channels_last)
        assert view.stride()[1:] == (1, shape[2] * shape[0], shape[0])
        assert torch.isfinite(view).all()


def test_views_are_the_drawn_parameters_applied_then_normalised() -> None:
    images = photographs(20, 1, 28, 28)
    for view, steps in ((GREY.weak, GREY.weak_steps), (GREY.strong, GREY.strong_steps), (GREY.flip, (Flip(),))):
        draws = views.draw(steps, images, seeded(8))
        assert torch.equal(view(images, seeded(8)), GREY.plain(views.apply(draws, images, fill=73)))


def test_no_steps_give_the_plain_view() -> None:
    look = Views.parse("none", "none", mean=[0.5], std=[0.5])
    images = photographs(4, 1, 28, 28)
    assert torch.equal(look.strong(images, seeded()), look.plain(images))


def test_flip_view_mirrors_about_half() -> None:
    images = photographs(200, 1, 28, 28)
    view, plain = GREY.flip(images, seeded(4)), GREY.plain(images)
    mirrored = (view == plain.flip(3)).flatten(1).all(1)
    assert ((view == plain).flatten(1).all(1) ^ mirrored).all()
    assert 70 < mirrored.sum() < 130


def test_an_uncut_view_is_a_strong_one_without_its_cutout() -> None:
    whole = Views.parse("flip crop(4)", STRONG.replace(" cutout(16)", ""), mean=COLOUR.mean, std=COLOUR.std)
    assert COLOUR.uncut_steps == whole.strong_steps != COLOUR.strong_steps


def test_same_seed_same_views_and_the_generator_moves_on() -> None:
    images = photographs(32, 3, 32, 32)
    first, second = seeded(9), seeded(9)
    one = COLOUR.strong(images, first)
    torch.manual_seed(123)
    assert torch.equal(one, COLOUR.strong(images, second))
    assert torch.equal(first.get_state(), second.get_state())
    assert not torch.equal(one, COLOUR.strong(images, first))
    assert not torch.equal(one, COLOUR.strong(images, seeded(10)))


def test_global_randomness_is_untouched() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    COLOUR.strong(photographs(8, 3, 32, 32), seeded())
    assert torch.equal(torch.get_rng_state(), before)


def test_views_of_channels_last_images_are_the_same() -> None:
    images = photographs(16, 3, 32, 32)
    interleaved = images.contiguous(memory_format=torch.channels_last)
    assert torch.equal(COLOUR.strong(images, seeded()), COLOUR.strong(interleaved, seeded()))
    assert torch.equal(COLOUR.plain(images), COLOUR.plain(interleaved))


# --- the language of steps and mistakes ---------------------------------------------------------------------------


def test_steps_are_read_from_words() -> None:
    assert COLOUR.weak_steps == (Flip(), Crop(4))
    assert COLOUR.strong_steps == (Flip(), Crop(4), RandAugment(2, 10), Cutout(16))
    assert views.parse_steps("  randaugment( 2, 10 )   cutout(16) ", key="k") == (RandAugment(2, 10), Cutout(16))
    assert views.parse_steps("none", key="k") == ()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("flop crop(4)", "views.weak: unknown step 'flop' in 'flop crop(4)'; did you mean 'flip'?"),
        ("flip randaug(2,10)", "unknown step 'randaug(2,10)' in 'flip randaug(2,10)'; did you mean 'randaugment'?"),
        ("Flip", "unknown step 'Flip' in 'Flip'; did you mean 'flip'?"),
        ("xyz", "valid: crop, cutout, flip, none, randaugment"),
        ("crop", "cannot read step 'crop' in 'crop'; did you mean 'crop(pixels)' with whole numbers?"),
        ("crop(4", "cannot read step 'crop(4'"),
        ("crop(4)flip", "cannot read step 'crop(4)flip'"),
        ("crop(2.5)", "cannot read step 'crop(2.5)'"),
        ("crop(-1)", "cannot read step 'crop(-1)'"),
        ("flip(2)", "did you mean 'flip'?"),
        ("randaugment(2)", "did you mean 'randaugment(count, magnitude)' with whole numbers?"),
        ("crop(0)", "step 'crop(0)' in 'crop(0)': pixels must be at least 1"),
        ("cutout(0)", "size must be at least 1"),
        ("randaugment(0,10)", "count must be from 1 to 20"),
        ("randaugment(21,10)", "count must be from 1 to 20"),
        ("randaugment(2,1)", "magnitude must be from 2 to 10"),
        ("randaugment(2,11)", "magnitude must be from 2 to 10"),
        ("none flip", "'none' stands alone"),
        (" ", "views.weak: no step given; write 'none'"),
    ],
)
def test_bad_words_are_named_with_the_nearest_step(text: str, complaint: str) -> None:
    with pytest.raises(UserError) as caught:
        Views.parse(text, "none", mean=[0.5], std=[0.5])
    assert complaint in str(caught.value)
    with pytest.raises(UserError, match=r"^views\.strong: "):
        Views.parse("none", text, mean=[0.5], std=[0.5])


def test_crop_as_large_as_the_image_is_refused_at_use() -> None:
    look = Views.parse("crop(8)", "none", mean=[0.5], std=[0.5])
    assert look.weak(blank(2, 1, 9, 9), seeded()).shape == (2, 1, 9, 9)
    with pytest.raises(UserError, match=r"crop\(8\) reflects 8 pixels .* these images are 8x30"):
        look.weak(blank(2, 1, 8, 30), seeded())


def test_two_channels_are_refused_by_randaugment() -> None:
    look = Views.parse("none", "randaugment(2,10)", mean=[0.5, 0.5], std=[0.5, 0.5])
    with pytest.raises(UserError, match="1 or 3 channels; these have 2"):
        look.strong(blank(2, 2), seeded())


@pytest.mark.parametrize("images", [blank(2).float(), blank(2, 1), blank(2)[0]])
def test_images_of_another_kind_are_refused(images: Tensor) -> None:
    with pytest.raises(ValueError, match=r"views need uint8 images \[n, 3, h, w\]"):
        COLOUR.plain(images)
    with pytest.raises(ValueError, match=r"views need uint8 images \[n, 3, h, w\]"):
        COLOUR.strong(images, seeded())


@pytest.mark.parametrize(("mean", "std"), [([0.5, 0.5], [0.5]), ([0.5], [0.0]), ([], [])])
def test_normalisation_needs_one_mean_and_deviation_a_channel(mean: list[float], std: list[float]) -> None:
    with pytest.raises(ValueError, match="one mean and one positive deviation a channel"):
        Views.parse("none", "none", mean=mean, std=std)


def test_the_second_weak_view_mirrors_only_where_the_first_may() -> None:
    images = torch.arange(64 * 28 * 28, dtype=torch.int64).remainder(251).to(torch.uint8).reshape(64, 1, 28, 28)
    mirrored = GREY.flip(images, seeded(3))
    plain, turned = GREY.plain(images), GREY.plain(images.flip(3))
    kept = [bool(torch.equal(view, image)) for view, image in zip(mirrored, plain, strict=True)]
    assert 0 < sum(kept) < 64
    for view, image, other in zip(mirrored, plain, turned, strict=True):
        assert torch.equal(view, image) or torch.equal(view, other)
    upright = Views.parse("crop(1)", "crop(1) cutout(3)", mean=[0.3], std=[0.3])  # digits: a mirrored one is another
    assert torch.equal(upright.flip(images, seeded(3)), upright.weak(images, seeded(3)))

"""Unseen images against closed forms, Pillow, and patch-by-patch loops."""

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from semifed.data.datasets import Dataset
from semifed.data.unseen import _permutations, converted, images_like
from semifed.errors import UserError


def dataset(*geometry: int, count: int = 30, seed: int = 0) -> Dataset:
    x = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (count, *geometry), dtype=np.uint8))
    y = torch.arange(count) % 3
    return Dataset("own", x[:0], y[:0], x, y, ("a", "b", "c"), (0.5,) * geometry[0], (0.2,) * geometry[0], "here")


def smooth(*shape: int) -> Tensor:
    """Images with gradients, where resampling filters agree to a grey level."""
    n, c, h, w = shape
    grid = np.add.outer(np.sin(np.linspace(0, 3, h)), np.cos(np.linspace(0, 4, w))) * 50 + 120
    scale = np.linspace(0.6, 1.0, n * c).reshape(n, c, 1, 1)
    return torch.from_numpy((grid * scale).round().astype(np.uint8))


def save(path: Path, x: Tensor) -> str:
    y = np.arange(len(x)) % 3
    np.savez(path, x_train=np.zeros(0, np.uint8), y_train=np.zeros(0, int), x_test=x.numpy(), y_test=y)
    return str(path)


@pytest.mark.parametrize("name", ["gaussian", "uniform", "patch-shuffle"])
def test_made_images_have_the_geometry_and_depend_on_the_seed_alone(name: str) -> None:
    like = dataset(3, 12, 8)
    images = images_like(name, like, seed=1, count=20)
    assert images.shape == (20, 3, 12, 8)
    assert images.dtype == torch.uint8
    assert images.is_contiguous()
    torch.manual_seed(5)
    assert torch.equal(images, images_like(name, like, seed=1, count=20))
    assert not torch.equal(images, images_like(name, like, seed=2, count=20))


def test_gaussian_noise_is_the_clipped_normal_of_odin() -> None:
    images = images_like("gaussian", dataset(1, 16, 16), seed=0, count=2_500).flatten().double()
    n = len(images)

    def below(value: float) -> float:
        return 0.5 * (1 + math.erf((value - 0.5) / math.sqrt(2)))

    for level in (0, 1, 60, 127, 200, 254):
        # a byte is at most `level` where the pixel lay below the middle between it and the next
        expected = below((level + 0.5) / 255)
        assert (images <= level).double().mean().item() == pytest.approx(expected, abs=4 / math.sqrt(n))
    assert images.max() == 255


def test_gaussian_chunks_are_not_repeated() -> None:
    images = images_like("gaussian", dataset(1, 4, 4), seed=0, count=2_100)
    assert not torch.equal(images[:1_000], images[1_000:2_000])
    assert images[2_000:].float().mean() == pytest.approx(127.5, abs=10)


def test_uniform_noise_reaches_every_value_equally() -> None:
    images = images_like("uniform", dataset(1, 16, 16), seed=0, count=1_000)
    counts = torch.bincount(images.flatten().long(), minlength=256).double()
    chi_square = ((counts - 1_000) ** 2 / 1_000).sum().item()
    assert abs(chi_square - 255) < 5 * math.sqrt(2 * 255)


def patches(image: Tensor) -> list[bytes]:
    rows, columns = image.shape[1] // 4, image.shape[2] // 4
    return [
        image[:, i * rows : (i + 1) * rows, j * columns : (j + 1) * columns].numpy().tobytes()
        for i in range(4)
        for j in range(4)
    ]


def test_patch_shuffle_moves_whole_patches() -> None:
    like = dataset(3, 12, 8)
    before = like.x_test.clone()
    shuffled = images_like("patch-shuffle", like, seed=0)
    assert torch.equal(like.x_test, before)
    assert len(shuffled) == len(like.x_test)
    orders = []
    for original, image in zip(like.x_test, shuffled, strict=True):
        assert patches(image) != patches(original)
        assert sorted(patches(image)) == sorted(patches(original))
        orders.append([patches(original).index(patch) for patch in patches(image)])
    assert orders == _permutations(len(shuffled), 16, torch.Generator().manual_seed(0)).tolist()
    assert len(set(map(tuple, orders))) == len(shuffled)


def test_patch_shuffle_leaves_the_odd_border_in_place() -> None:
    like = dataset(1, 15, 10)
    shuffled = images_like("patch-shuffle", like, seed=0)
    assert torch.equal(shuffled[:, :, 12:], like.x_test[:, :, 12:])
    assert torch.equal(shuffled[:, :, :, 8:], like.x_test[:, :, :, 8:])
    for original, image in zip(like.x_test, shuffled, strict=True):
        assert sorted(patches(image[:, :12, :8])) == sorted(patches(original[:, :12, :8]))
    with pytest.raises(UserError, match="at least 4x4 pixels, found 3x8"):
        images_like("patch-shuffle", dataset(1, 3, 8), seed=0)


@settings(max_examples=30, deadline=None)
@given(places=st.integers(2, 5), seed=st.integers(0, 1_000))
def test_permutations_are_never_the_identity(places: int, seed: int) -> None:
    permutations = _permutations(200, places, torch.Generator().manual_seed(seed))
    assert all(sorted(p) == list(range(places)) for p in permutations.tolist())
    assert not any(p == list(range(places)) for p in permutations.tolist())


def test_another_set_of_the_same_geometry_is_untouched(tmp_path: Path) -> None:
    like, other = dataset(3, 6, 5), dataset(3, 6, 5, seed=1)
    path = save(tmp_path / "other.npz", other.x_test)
    assert torch.equal(images_like(path, like, seed=0), other.x_test)
    assert torch.equal(images_like("other", like, seed=0, data=str(tmp_path)), other.x_test)


def test_a_folder_that_nobody_divided_is_unseen_as_a_whole(tmp_path: Path) -> None:
    pixels = dataset(3, 6, 5, count=10).x_test

    def write(path: Path, image: Tensor) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)

    for number, image in enumerate(pixels):
        write(tmp_path / "LSUN" / "resized" / f"{number}.png", image)
    unseen = images_like("LSUN", dataset(3, 6, 5, seed=1), seed=0, data=str(tmp_path))
    assert sorted(image.tolist() for image in unseen) == sorted(image.tolist() for image in pixels)
    for part, image in (("train", pixels[0]), ("test", pixels[1])):
        write(tmp_path / "divided" / part / "a" / "0.png", image)
    assert torch.equal(images_like("divided", dataset(3, 6, 5), seed=0, data=str(tmp_path)), pixels[1:2])


def test_at_most_count_images_are_drawn_without_replacement_in_order(tmp_path: Path) -> None:
    other = torch.arange(200, dtype=torch.uint8).view(-1, 1, 1, 1).expand(200, 1, 4, 4)
    path = save(tmp_path / "other.npz", other)
    drawn = images_like(path, dataset(1, 4, 4), seed=0, count=50)[:, 0, 0, 0].tolist()
    assert len(drawn) == 50
    assert all(a < b for a, b in pairwise(drawn))
    assert max(drawn) > 100
    again = images_like(path, dataset(1, 4, 4), seed=1, count=50)[:, 0, 0, 0].tolist()
    assert again != drawn
    assert len(images_like("patch-shuffle", dataset(1, 4, 4), seed=0, count=7)) == 7
    with pytest.raises(UserError, match="count = 0"):
        images_like("uniform", dataset(1, 4, 4), seed=0, count=0)


@pytest.mark.parametrize("size", [(8, 8), (28, 20), (45, 50)])
def test_resizing_agrees_with_pillow(size: tuple[int, int]) -> None:
    images = smooth(3, 3, 32, 32)
    ours = converted(images, (3, *size))
    for image, resized in zip(images, ours, strict=True):
        picture = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
        expected = np.asarray(picture.resize((size[1], size[0]), Image.Resampling.BILINEAR)).astype(int)
        assert np.abs(resized.permute(1, 2, 0).numpy().astype(int) - expected).max() <= 1


def test_downscaling_averages_instead_of_dropping_pixels() -> None:
    stripes = torch.zeros(1, 1, 32, 32, dtype=torch.uint8)
    stripes[..., ::2] = 200
    inner = converted(stripes, (1, 8, 8))[..., 2:-2]
    assert torch.all((inner.int() - 100).abs() <= 2)


def test_colour_becomes_luma_and_grey_is_repeated() -> None:
    colour = dataset(3, 9, 7).x_test
    grey = converted(colour, (1, 9, 7))
    for image, ours in zip(colour, grey, strict=True):
        expected = np.asarray(Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()).convert("L"))
        assert np.abs(ours[0].numpy().astype(int) - expected.astype(int)).max() <= 1
    pure = torch.tensor([[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 255]], dtype=torch.uint8)
    assert converted(pure[:, :, None, None], (1, 1, 1)).flatten().tolist() == [76, 150, 29, 255]
    repeated = converted(grey, (3, 9, 7))
    assert all(torch.equal(repeated[:, channel], grey[:, 0]) for channel in range(3))


def test_many_images_are_converted_piece_by_piece_alike() -> None:
    images = dataset(3, 6, 6, count=2_300).x_test
    whole = converted(images, (1, 4, 4))
    for i in (0, 999, 1_000, 1_999, 2_000, 2_299):
        assert torch.equal(whole[i], converted(images[i : i + 1], (1, 4, 4))[0])


def test_impossible_channels_are_told() -> None:
    with pytest.raises(UserError, match="2 channels into 3"):
        converted(torch.zeros(1, 2, 4, 4, dtype=torch.uint8), (3, 4, 4))


def test_unknown_names_hint_at_noise_and_data_sets(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'gaussian'"):
        images_like("gausian", dataset(1, 4, 4), seed=0, data=str(tmp_path))
    with pytest.raises(UserError, match="did you mean 'fashion-mnist'") as error:
        images_like("fashion", dataset(1, 4, 4), seed=0, data=str(tmp_path))
    assert "path to an .npz" in str(error.value)


def test_digits_can_stand_in_for_any_geometry() -> None:
    images = images_like("digits", dataset(3, 32, 32), seed=0, count=100)
    assert images.shape == (100, 3, 32, 32)
    assert torch.equal(images[:, 0], images[:, 2])
    assert images.float().std() > 30

"""What a recipe makes of a method's wish for further heads."""

import pytest
import torch

from semifed.assembly import build_workplace, further_heads, prepare_run
from semifed.errors import UserError
from toys import toy_dataset, toy_recipe


def shapes(method: str, heads: dict[str, str]) -> dict[str, tuple[int, ...]]:
    recipe = toy_recipe(method, "server", {"model": {"heads": heads}})
    net = build_workplace(recipe, (1, 8, 8), 3).net
    return {name: tuple(tensor.shape) for name, tensor in net.state().items() if name.startswith("heads.")}


def test_a_method_brings_its_heads() -> None:
    assert shapes("fedfixmatch", {}) == {}
    found = shapes("openfl", {})
    assert found["heads.ova.layers.0.weight"] == (256, 8)
    assert found["heads.ova.layers.2.weight"] == (6, 256)
    assert found["heads.projection.0.weight"] == (8, 8)
    assert found["heads.projection.2.weight"] == (128, 8)
    assert {name.split(".")[1] for name in shapes("fedssb", {})} == {"ova"}


def test_a_recipe_sizes_them() -> None:
    found = shapes("openfl", {"ova": "mlp3(20)", "projection": "linear(16)"})
    assert found["heads.ova.layers.2.weight"] == (20, 20)
    assert found["heads.ova.layers.4.weight"] == (6, 20)
    assert found["heads.projection.weight"] == (16, 8)
    assert shapes("openfl", {"ova": "linear"})["heads.ova.layers.weight"] == (6, 8)


def test_a_recipe_with_sizes_serves_methods_without_such_heads() -> None:
    """So that one recipe compares all methods."""
    assert shapes("fedfixmatch", {"ova": "mlp3(20)", "projection": "16"}) == {}
    assert set(shapes("fedssb", {"projection": "16"})) == set(shapes("fedssb", {}))


@pytest.mark.parametrize(("name", "nearest"), [("ovaa", "ova"), ("projektion", "projection")])
def test_a_head_nobody_asks_for_is_a_mistake(name: str, nearest: str) -> None:
    recipe = toy_recipe("openfl", "server", {"model": {"heads": {name: "16"}}})
    with pytest.raises(UserError, match=rf"model\.heads\.{name}: no method asks for such a head.*{nearest}"):
        further_heads(recipe, recipe.build_method())


@pytest.mark.parametrize(("name", "size"), [("ova", "mlp(3)"), ("projection", "wide"), ("projection", "0")])
def test_a_size_that_is_none_is_a_mistake(name: str, size: str) -> None:
    recipe = toy_recipe("openfl", "server", {"model": {"heads": {name: size}}})
    with pytest.raises(UserError, match=rf"model\.heads\.{name}: expected"):
        build_workplace(recipe, (1, 8, 8), 3)


def test_images_of_one_colour_are_told_before_any_training() -> None:
    recipe, dataset = toy_recipe("fedavg", "clients"), toy_dataset()
    prepare_run(recipe, dataset)
    with pytest.raises(UserError, match=r"dataset: all training images of .* are of one colour; 16-bit pixels"):
        prepare_run(recipe, dataset._replace(x_train=torch.full_like(dataset.x_train, 7)))

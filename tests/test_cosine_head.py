"""Heads of category discovery: a classifier of cosines, and a projection with GELU as in DINO."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import erf
from torch import nn

from semifed.errors import UserError
from semifed.models.heads import Cosine, DinoLinear, class_head_spec, further_head_spec
from semifed.models.network import Network, build_network
from semifed.net import Net
from semifed.recipe import ModelTable


def build(seed: int = 0, **options: Any) -> Network:
    settings: dict[str, Any] = {"channels": 1, "size": (8, 8), "classes": 5, "width": (4, 4, 8)} | options
    return build_network("cnn", generator=torch.Generator().manual_seed(seed), **settings).eval()


def images(count: int) -> torch.Tensor:
    return torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize(("head", "temperature"), [("cosine", 0.1), ("cosine(0.1)", 0.1), ("cosine(0.07)", 0.07)])
def test_logits_are_cosines_over_the_temperature(head: str, temperature: float) -> None:
    net = build(head=head)
    output = net(images(6))
    rows = net.classifier.weight.detach().double().numpy()  # type: ignore[union-attr, operator]
    for feature, logits in zip(output.features.detach().double().numpy(), output.logits.tolist(), strict=True):
        for row, logit in zip(rows, logits, strict=True):
            cosine = sum(a * b for a, b in zip(feature, row, strict=True)) / math.hypot(*feature) / math.hypot(*row)
            assert logit == pytest.approx(cosine / temperature, rel=1e-4, abs=1e-4)


def test_only_directions_count() -> None:
    head = Cosine(6, 4, 0.1)
    head.reset(torch.Generator().manual_seed(0))
    features = torch.randn(9, 6, generator=torch.Generator().manual_seed(1))
    before = head(features)
    with torch.no_grad():
        head.weight.mul_(torch.tensor([[0.1], [3.0], [7.0], [1.0]]))
    torch.testing.assert_close(head(2.5 * features), before)
    assert before.abs().max() <= 10 + 1e-4


def test_a_step_turns_a_row_by_its_size_over_the_squared_length() -> None:
    """What the stored length means: the gradient stands upright on the row and shrinks as the row grows."""
    features = torch.randn(9, 6, generator=torch.Generator().manual_seed(1))
    slopes = []
    for length in (1.0, 2.0):
        head = Cosine(6, 4, 0.1)
        head.reset(torch.Generator().manual_seed(0))
        with torch.no_grad():
            head.weight.mul_(length)
        head(features)[:, 0].sum().backward()
        assert head.weight.grad is not None
        assert float((head.weight.grad * head.weight.detach()).sum(dim=1).abs().max()) < 1e-4
        slopes.append(head.weight.grad)
    torch.testing.assert_close(slopes[0], 2 * slopes[1])


@pytest.mark.parametrize("features", [64, 768])
def test_rows_start_in_random_directions_of_the_same_length_whatever_their_dimension(features: int) -> None:
    head = Cosine(features, 300, 0.1)
    head.reset(torch.Generator().manual_seed(2))
    rows = head.weight.detach().double().numpy()
    assert np.linalg.norm(rows, axis=1).mean() == pytest.approx(3**-0.5, rel=0.02)
    # A coordinate of a uniform direction: (1 + u)/2 is Beta((d-1)/2, (d-1)/2); close to it already for a cube's draw.
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    random = np.random.default_rng(0).normal(size=features)
    along = unit @ (random / np.linalg.norm(random))
    share = (features - 1) / 2
    assert stats.kstest((1 + along) / 2, stats.beta(share, share).cdf).pvalue > 1e-3


def test_its_rows_are_found_as_those_of_other_classifiers() -> None:
    net = Net(build(head="cosine"), "tracked")
    assert net.class_rows == "classifier.weight"
    assert net.named_parameters()[net.class_rows].shape == (5, 8)
    assert [name for name in net.state() if name.startswith("classifier")] == ["classifier.weight"]


def test_it_leaves_the_backbone_and_further_heads_as_they_are() -> None:
    """Five rows of eight uniform draws in both, but no bias: only what comes after the classifier may differ."""
    linear, cosine = build().state_dict(), build(head="cosine").state_dict()
    for name in cosine:
        assert torch.equal(cosine[name], linear[name])


def test_gelu_head_equals_matrix_products() -> None:
    net = build(further={"projection": "mlp3(16, 6, gelu)"})
    generator = torch.Generator().manual_seed(3)
    for parameter in net.heads.parameters():  # as drawn, they stay where GELU is nearly straight
        parameter.data.normal_(generator=generator)
    output = net(images(4))
    state = {name: tensor.double().numpy() for name, tensor in net.state_dict().items()}
    x = output.features.detach().double().numpy()
    for layer in (0, 2, 4):
        if layer:
            x = x * (1 + erf(x / math.sqrt(2))) / 2
        x = x @ state[f"heads.projection.{layer}.weight"].T + state[f"heads.projection.{layer}.bias"]
    np.testing.assert_allclose(output.heads["projection"].detach().numpy(), x, rtol=1e-4, atol=1e-5)


def test_gelu_head_is_drawn_as_dinos() -> None:
    net = build(further={"projection": "mlp3(256, 64, gelu)"})
    layers = [layer for layer in net.heads["projection"].modules() if isinstance(layer, nn.Linear)]
    assert [tuple(layer.weight.shape) for layer in layers] == [(256, 8), (256, 256), (64, 256)]
    assert all(isinstance(layer, DinoLinear) and not layer.bias.any() for layer in layers)
    for layer in layers:  # narrower than DINO's: each keeps the size of what passes through it
        drawn = layer.weight.detach().flatten().numpy()
        assert stats.kstest(drawn, stats.norm(scale=layer.weight.shape[1] ** -0.5).cdf).pvalue > 1e-3
    wide = DinoLinear(2048, 64)
    wide.reset(torch.Generator().manual_seed(0))
    assert stats.kstest(wide.weight.detach().flatten().numpy(), stats.norm(scale=0.02).cdf).pvalue > 1e-3
    assert not any(isinstance(layer, nn.BatchNorm1d) for layer in net.modules())


def test_a_head_with_relu_keeps_its_draws() -> None:
    relu, gelu = (build(further={"z": f"mlp2(7, 3{word})"}).state_dict() for word in ("", ", gelu"))
    assert relu.keys() == gelu.keys()
    bound = 8**-0.5
    assert 0.02 * 4 < relu["heads.z.0.weight"].abs().max() <= bound
    assert relu["heads.z.0.bias"].any()
    for name in relu:
        if not name.startswith("heads"):
            assert torch.equal(relu[name], gelu[name])


def test_the_head_of_the_papers_has_their_size() -> None:
    spec = further_head_spec("projection", "mlp3(2048, 256, gelu)")
    assert (spec.hidden, spec.outputs, spec.gelu) == ((2048, 2048), 256, True)
    assert class_head_spec("cosine", "model.head").temperature == 0.1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"head": "cosin"}, ["model.head", "did you mean 'cosine'?"]),
        ({"head": "cosine(0)"}, ["model.head", "'cosine(0)'"]),
        ({"head": "cosine(-1)"}, ["model.head", "'cosine(-1)'"]),
        ({"head": "cosine(.)"}, ["model.head"]),
        ({"further": {"ova": "cosine"}}, ["model.heads.ova", "no cosines", "'linear'"]),
        ({"further": {"z": "mlp3(16, 6, gello)"}}, ["model.heads.z", "mlp3(2048, 256, gelu)"]),
        ({"further": {"z": "linear(6, gelu)"}}, ["model.heads.z"]),
    ],
)
def test_mistakes_name_the_key(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        build(**options)
    for word in words:
        assert word in str(caught.value)


def test_a_recipe_may_say_so() -> None:
    table = ModelTable(head="cosine(0.000001)", heads={"projection": "mlp3(2048, 256, gelu)"})
    assert class_head_spec(table.head, "model.head").temperature == 1e-6
    with pytest.raises(ValueError, match="more than 65536 units"):
        ModelTable(heads={"projection": "mlp3(204800, 256, gelu)"})

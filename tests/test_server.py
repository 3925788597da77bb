"""The server's own training and the statistics it computes on its labelled images."""

import numpy as np
import pytest
import torch

from reference.batchnorm import cnn_statistics
from semifed.assembly import build_workplace
from semifed.data.client import Budget, batches
from semifed.fit import Optimiser, fit
from semifed.net import Net
from semifed.objectives import supervised
from semifed.server import ServerSite
from toys import equal_weights, toy_parts, toy_recipe

OPTIMISER = Optimiser(0.05, 0.9, weight_decay=1e-3)


def small_net(labels: str = "server") -> Net:
    return build_workplace(toy_recipe("fixmatch-lpl", labels), (1, 8, 8), 3).net


def site_of(labels: str = "server", warmup: int = 2, finetune: int = 1) -> ServerSite:
    scenario = toy_parts(toy_recipe("fixmatch-lpl", labels)).scenario
    return ServerSite(
        small_net(labels),
        scenario.server,
        OPTIMISER,
        batch=5,
        warmup_epochs=warmup,
        finetune_epochs=finetune,
        seed=3,
    )


@pytest.mark.parametrize(("purpose", "round_", "epochs"), [("warm-up", 0, 2), ("fine-tune", 4, 1)])
def test_training_is_fit_on_the_servers_stream_then_fresh_statistics(purpose: str, round_: int, epochs: int) -> None:
    site, net = site_of(), small_net()
    assert site.labelled is not None
    site.round, site.lr = round_, 0.02
    start = net.state()
    trained = (site.warm_up if purpose == "warm-up" else site.fine_tune)(start, supervised)
    steps = batches(site.labelled, Budget(epochs, None, 5), (3, round_, "server", purpose))
    fitted = fit(net, steps, supervised, OPTIMISER._replace(lr=0.02))
    assert fitted.steps == epochs * 2  # 12 labels in batches of 5, the tail of 2 dropped
    parameters = {name: tensor for name, tensor in trained.items() if "running_" not in name}
    assert equal_weights(parameters, net.trained())
    assert site.notes["server_loss"] == fitted.terms
    raw = site.labelled.images[site.labelled.labelled].numpy().astype(np.float64)
    for name, expected in cnn_statistics(trained, (raw / 255 - 0.5) / 0.25).items():
        np.testing.assert_allclose(trained[name].numpy(), expected, rtol=2e-4, atol=2e-5)


def test_a_server_without_labels_hands_weights_on() -> None:
    site = site_of("clients")
    weights = small_net("clients").state()
    assert site.warm_up(weights, supervised) is weights
    assert site.fine_tune(weights, supervised) is weights
    assert site.recalibrated(weights) is weights
    assert len(site.plain_images()) == 0


def test_no_epochs_still_give_the_statistics_of_the_weights() -> None:
    site = site_of(warmup=0)
    start = small_net().state()
    after = site.warm_up(start, supervised)
    for name, tensor in after.items():
        assert torch.equal(tensor, start[name]) == ("running_" not in name)


def test_recalibration_changes_statistics_alone_and_only_once() -> None:
    site = site_of()
    start = small_net().state()
    once = site.recalibrated(start)
    twice = site.recalibrated(once)
    for name in start:
        torch.testing.assert_close(once[name], twice[name], rtol=1e-5, atol=1e-6)
        assert torch.equal(once[name], start[name]) == ("running_" not in name)


def test_tracked_statistics_are_left_alone() -> None:
    site = site_of()
    site.net.batchnorm = "tracked"
    weights = small_net().state()
    assert site.recalibrated(weights) is weights


def test_streams_belong_to_round_and_purpose() -> None:
    site = site_of()
    first = torch.rand(3, generator=site.stream("mix"))
    assert torch.equal(first, torch.rand(3, generator=site.stream("mix")))
    assert not torch.equal(first, torch.rand(3, generator=site.stream("other")))
    site.round = 1
    assert not torch.equal(first, torch.rand(3, generator=site.stream("mix")))


def test_notes_gather() -> None:
    site = site_of()
    site.note(one=1)
    site.note(two=2)
    assert site.notes == {"one": 1, "two": 2}

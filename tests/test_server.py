"""The server's own training and the statistics it computes on its labelled images."""

import numpy as np
import pytest
import torch

from reference.batchnorm import cnn_statistics
from semifed.assembly import build_workplace
from semifed.data.client import Budget, batches
from semifed.fit import Diverged, Optimiser, fit
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
        rounds=10,
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


def test_weights_that_are_no_numbers_are_not_handed_on() -> None:
    """The loss is looked at before a step: what the last one did was tested as if it were a model."""
    site = site_of(finetune=1)
    site._batch = 12  # one step
    site.lr = 1e38
    with pytest.raises(Diverged, match="in the last step"):
        site.fine_tune({name: 10 * tensor for name, tensor in small_net().state().items()}, supervised)


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


def test_averaged_statistics_survive_fine_tuning_alone() -> None:
    """OpenFL without static batch norm: gates and tests normalise by what the clients tracked."""
    start = {name: tensor + 0.5 if "running_" in name else tensor for name, tensor in small_net().state().items()}
    for kind, survives in (("averaged", True), ("tracked", False)):
        shown: list[dict[str, torch.Tensor]] = []
        site = site_of(finetune=2)
        site.net = Net(site.net.network, kind)
        tuned, warm = site.fine_tune(start, supervised, shown.append), site.warm_up(start, supervised)
        for name, tensor in start.items():
            if "running_" in name:
                assert torch.equal(tuned[name], tensor) == survives
                assert all(torch.equal(one[name], tensor) == survives for one in shown)
                assert not torch.equal(warm[name], tensor)
            else:
                assert not torch.equal(tuned[name], tensor)


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


@pytest.mark.parametrize(("warmup", "labels"), [(2, "server"), (0, "server"), (2, "clients")])
def test_an_untrained_start_counts_for_nothing_in_the_average(warmup: int, labels: str) -> None:
    site = site_of(labels, warmup=warmup)
    old, new = {"kernel": torch.tensor([1.0])}, {"kernel": torch.tensor([3.0])}
    trained = warmup > 0 and labels == "server"
    site.round = 1
    assert float(site.averaged(old, new, 0.75)["kernel"]) == pytest.approx(1.5 if trained else 3.0)
    site.round = 2
    assert float(site.averaged(old, new, 0.75)["kernel"]) == pytest.approx(1.5)


def test_after_each_epoch_of_fine_tuning_its_weights_are_shown() -> None:
    """What is shown after epoch e is what a server with e epochs ends with, statistics aside."""
    shown: list[dict[str, torch.Tensor]] = []
    site = site_of(finetune=3)
    start = small_net().state()
    final = site.fine_tune(start, supervised, shown.append)
    assert len(shown) == 3
    for epochs, weights in enumerate(shown, start=1):
        shorter = site_of(finetune=epochs).fine_tune(start, supervised)
        for name in weights:
            assert "running_" in name or torch.equal(weights[name], shorter[name])
    assert all(torch.equal(shown[2][name], final[name]) for name in final if "running_" not in name)
    assert not torch.equal(shown[0]["classifier.weight"], shown[1]["classifier.weight"])


def test_no_epoch_is_shown_where_none_is_trained() -> None:
    shown: list[dict[str, torch.Tensor]] = []
    site_of(finetune=0).fine_tune(small_net().state(), supervised, shown.append)
    site_of("clients").fine_tune(small_net("clients").state(), supervised, shown.append)
    assert shown == []


def test_outputs_are_those_of_the_plain_images_in_evaluation() -> None:
    site, net = site_of(), small_net()
    weights = site.recalibrated(net.state())
    net.load(weights)
    seen = site.outputs(weights)
    assert seen is not None
    torch.testing.assert_close(seen.logits, net(site.plain_images()).logits.detach())
    assert not seen.logits.requires_grad
    assert site_of("clients").outputs(small_net("clients").state()) is None

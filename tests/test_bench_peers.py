"""Peers of the benchmark: everyone does the same work, and what is not installed is said."""

from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

from local_grid import run_simulation
from semifed.assembly import Parts
from semifed.bench import naive, peers
from semifed.bench.plain_loop import Job, Lap, QuickSGD, average, batchwise, new_network, step_loss, train
from semifed.bench.workload import Workload
from semifed.data.client import Batch, Budget, Samples, batches
from semifed.methods.fedavg import FedAvg
from semifed.methods.fixmatch_lpl import FixMatchLPL
from semifed.models import BatchNorm
from semifed.net import Net
from semifed.payloads import Nothing

# Each of three clients holds 20 images, 10 of them labelled; semifed drops the last batch of a pass if it has fewer
# than 8 images, here there is none.
TINY = Workload(
    "tiny",
    "sage/fashion-mini",
    (
        "method=fixmatch-lpl",
        "scenario.clients=3",
        "clients_per_round=2",
        "scenario.labelled_per_class=3",
        "model.width=[2,3,4]",
        "local.steps=2",
        "local.batch=5",
    ),
    (1, 8, 8),
    images=60,
    tests=20,
)
LABELS_ONLY = TINY._replace(name="labels only", overrides=(*TINY.overrides, "method=fedavg"))
STEPS = 2 * 2  # clients, steps
IMAGES = {FixMatchLPL: STEPS * (5 + 10), FedAvg: STEPS * 5}

needs_pfl = pytest.mark.skipif(find_spec("pfl") is None, reason="pfl is not installed")


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    return TINY.parts(tmp_path)


@pytest.fixture(params=[TINY, LABELS_ONLY], ids=lambda load: load.name)
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Parts:
    load: Workload = request.param
    return load.parts(tmp_path)


def assert_same_work(lap: Lap, steady: int, method: type = FixMatchLPL) -> None:
    assert (lap.steps, lap.images) == (STEPS, IMAGES[method])
    assert len(lap.seconds) == steady
    assert min(*lap.seconds, lap.first) > 0


def test_semifed_does_the_work(either: Parts) -> None:
    assert_same_work(peers.semifed_rounds(either, 2, workers=1), 2, type(either.method))


@pytest.mark.slow
def test_two_workers_do_the_work(parts: Parts) -> None:
    assert_same_work(peers.semifed_rounds(parts, 1, workers=2), 1)


def test_the_naive_loop_does_the_work(either: Parts) -> None:
    assert_same_work(naive.naive_rounds(either, 2), 2, type(either.method))


def test_only_the_naive_loop_leaves_maps_channel_by_channel(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """As papers' code does: where maps lie decides how quick a small network is on a processor."""
    laid: list[bool] = []

    def watched(network: nn.Module, *told: object) -> tuple[int, int]:
        laid.extend(one.is_contiguous() for one in network.parameters() if one.ndim == 4 and min(one.shape[1:]) > 1)
        return train(network, *told)  # type: ignore[arg-type]

    monkeypatch.setattr(naive, "train", watched)
    naive.naive_rounds(parts, 1)
    assert laid
    assert all(laid)
    network = new_network(parts)
    assert not any(one.kernels for one in network.modules() if isinstance(one, BatchNorm)), "nobody else has ours"
    quick = [one for one in network.parameters() if one.ndim == 4 and min(one.shape[1:]) > 1]
    assert quick
    assert all(one.is_contiguous(memory_format=torch.channels_last) for one in quick)


@pytest.mark.parametrize("naive", [False, True])
def test_plain_flower_does_the_work(either: Parts, monkeypatch: pytest.MonkeyPatch, naive: bool) -> None:
    from semifed.bench.plain_flower import flower_rounds

    monkeypatch.setattr("flwr.simulation.run_simulation", run_simulation)
    monkeypatch.setattr("semifed.engines.flower_simulation.ray_started", lambda workers: nullcontext())
    assert_same_work(flower_rounds(either, 2, workers=1, naive=naive), 2, type(either.method))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's and Flower's own
@pytest.mark.parametrize("naive", [False, True])
def test_plain_flower_does_the_work_on_ray_and_ends_it(parts: Parts, naive: bool) -> None:
    import ray

    from semifed.bench.plain_flower import flower_rounds

    assert_same_work(flower_rounds(parts, 1, workers=2, naive=naive), 1)
    assert not ray.is_initialized()


@needs_pfl
@pytest.mark.filterwarnings("ignore")  # pfl's own
@pytest.mark.parametrize("naive", [False, True])
def test_plain_pfl_does_the_work(either: Parts, naive: bool) -> None:
    from semifed.bench.plain_pfl import pfl_rounds

    assert_same_work(pfl_rounds(either, 2, naive=naive), 2, type(either.method))


@needs_pfl
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("naive", [False, True])
def test_two_processes_of_pfl_do_the_work(parts: Parts, naive: bool) -> None:
    from semifed.bench.plain_pfl import torchrun_rounds

    assert_same_work(torchrun_rounds(parts, 1, processes=2, naive=naive), 1)


def test_the_plain_loss_is_that_of_the_method(parts: Parts) -> None:
    data, network = parts.scenario.client(0), new_network(parts)
    (seen, *_) = batchwise(data, Job.of(parts), 1)
    samples = Samples(data.images[:0], torch.arange(0), seen.labels, data.views, ())
    unlabelled = Samples(data.images[:0], torch.arange(len(seen.weak)), torch.empty(0), data.views, ())
    vars(samples)["weak"] = seen.labelled
    vars(unlabelled).update(weak=seen.weak, strong=seen.strong)
    for threshold in (0.0, 0.1, 0.95):
        method = FixMatchLPL(threshold=threshold)
        ours = method.loss(Net(network, "tracked"), Batch(samples, unlabelled), None)  # type: ignore[arg-type]
        told = Job.of(parts)._replace(threshold=threshold)
        torch.testing.assert_close(step_loss(network, seen, told), ours.value)


def test_the_plain_loss_of_labels_is_that_of_fedavg(tmp_path: Path) -> None:
    parts = LABELS_ONLY.parts(tmp_path)
    (seen, *_) = batchwise(parts.scenario.client(0), Job.of(parts), 1)
    (batch, *_) = batches(parts.scenario.client(0), Budget(None, 2, 5, 2), (1,))
    network = new_network(parts)
    ours = FedAvg().loss(Net(network, "tracked"), batch, Nothing())
    torch.testing.assert_close(step_loss(network, seen, Job.of(parts)), ours.value)


def test_peers_see_what_semifeds_clients_see(parts: Parts) -> None:
    """The same batches and views, those of all steps computed in one go: neither is what rows are to compare."""
    data, job = parts.scenario.client(0), Job.of(parts)
    theirs = list(batchwise(data, job, "an address"))
    ours = list(batches(data, Budget(None, job.steps, 5, 2), ("an address",)))
    assert len(ours[0].labelled.beside) == len(theirs) == job.steps
    for seen, batch in zip(theirs, ours, strict=True):
        assert torch.equal(seen.labelled, batch.labelled.weak)
        assert torch.equal(seen.labels, batch.labelled.labels)
        assert torch.equal(seen.weak, batch.unlabelled.weak)
        assert torch.equal(seen.strong, batch.unlabelled.strong)


def test_the_quick_sgd_moves_weights_as_pytorchs_class_does(parts: Parts) -> None:
    ended = []
    job = Job.of(parts)
    assert job.sgd["momentum"] > 0
    for kind in (QuickSGD, torch.optim.SGD):
        network = new_network(parts)
        train(network, batchwise(parts.scenario.client(0), job, 1), job, kind(network.parameters(), **job.sgd))  # type: ignore[arg-type]
        ended.append(network.state_dict())
    quick, usual = ended
    assert all(torch.equal(quick[name], usual[name]) for name in usual)
    assert any(not torch.equal(quick[name], first) for name, first in new_network(parts).state_dict().items())


def test_images_are_averaged_by_count() -> None:
    states = [{"a": torch.tensor([1.0, 2.0])}, {"a": torch.tensor([5.0, 2.0])}]
    assert average(states, [3, 1])["a"].tolist() == [2.0, 2.0]


def test_a_plain_loop_refuses_other_methods(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fixmatch-lpl and fedavg"):
        Job.of(TINY._replace(overrides=(*TINY.overrides, "method=fedprox")).parts(tmp_path))


def test_the_table_says_who_is_missing_and_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.Contestant, "installed", lambda self: not self.needs)
    table = peers.compared(TINY, tmp_path, turns=2, everyone=peers.contestants(1), steady=1)
    rows = {str(row[0]): row for row in table.rows}
    assert list(rows) == [
        "semifed, 1 worker",
        "Flower simulation, 1 Ray actor",
        "Flower simulation, 1 Ray actor, naive clients",
        "pfl-research, 1 process",
        "pfl-research, 1 process, naive clients",
        "naive loop",
    ]
    assert rows["pfl-research, 1 process"][2:] == ["not installed: pip install 'pfl[pytorch]==0.6.0'", None]
    assert "semifed[flower]" in str(rows["Flower simulation, 1 Ray actor"][2])
    assert rows["semifed, 1 worker"][3] is None
    assert "to" in str(rows["naive loop"][3])
    facts = table.facts["naive loop"]
    assert len(facts["seconds"]) == 2
    assert facts["steps_a_round"] == [STEPS] * 2
    assert len(facts["steady_rounds"][0]) == 1
    assert all(len(row) == len(table.header) for row in table.rows)
    assert tuple(table.notes) == peers.NOTES


def test_who_does_other_work_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lazy(parts: Parts, steady: int) -> Lap:
        return Lap([1.0] * steady, 1.0, 0.0, 1, 1)

    few = [peers.contestants(1)[0], peers.Contestant("lazy", 1, lazy)]
    monkeypatch.setattr(peers, "contestants", lambda workers: few)
    table = peers.compared(TINY, tmp_path, turns=1, everyone=peers.contestants(1), steady=1)
    assert table.notes[-1].startswith("lazy did another number")


def test_names_count_workers() -> None:
    assert [one.name for one in peers.contestants(2)] == [
        "semifed, 2 workers",
        "semifed, 1 worker",
        "Flower simulation, 2 Ray actors",
        "Flower simulation, 2 Ray actors, naive clients",
        "pfl-research, 2 processes",
        "pfl-research, 2 processes, naive clients",
        "pfl-research, 1 process",
        "naive loop",
    ]

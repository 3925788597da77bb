"""Parts of the benchmark: that contestants do the same work, that numbers are where they belong. Never how fast."""

import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from matplotlib.container import ErrorbarContainer
from torch import Tensor

from semifed.aggregate import weighted_mean
from semifed.assembly import Parts
from semifed.bench import aggregation, pillow_views, plots, scaling, views, workload
from semifed.bench.aggregation import aggregation_cost, cohort_of, extra_memory
from semifed.bench.measuring import Table
from semifed.bench.pillow_views import PillowViews, as_picture, as_tensor
from semifed.bench.plots import draw
from semifed.bench.step_cost import step_cost
from semifed.bench.views import NOT_INSTALLED, view_speed
from semifed.bench.workload import FIXMATCH_CNN
from semifed.data import randaugment
from semifed.data.randaugment import RandAugmentDraw
from semifed.data.views import Views

STRONG = "flip crop(4) randaugment(2,10) cutout(16)"
COLOUR = Views.parse("flip crop(4)", STRONG, mean=(0.5, 0.4, 0.3), std=(0.25, 0.2, 0.3))
GREY = Views.parse("flip crop(2)", "flip crop(2) randaugment(2,10) cutout(14)", mean=(0.3,), std=(0.35,))
SMALL = ((6, 5), (5,), (2, 3, 3, 3))


def noise(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(1), dtype=torch.uint8)


# --- views ---------------------------------------------------------------------------------------------------------


def test_pillow_has_the_same_operations() -> None:
    assert set(pillow_views.OPERATIONS) == set(randaugment.OPERATIONS)


@pytest.mark.parametrize("name", randaugment.OPERATIONS)
def test_pillow_operation_does_what_ours_does(name: str) -> None:
    images = noise(18, 3, 32, 32)
    levels, negative = torch.arange(9).repeat(2)[:, None] + 1, torch.arange(18)[:, None] >= 9
    operations = torch.full((18, 1), randaugment.OPERATIONS.index(name))
    ours = RandAugmentDraw(operations, levels, negative, torch.ones(18, 1, dtype=torch.bool)).apply(images)
    theirs = [
        pillow_views.OPERATIONS[name](as_picture(image), int(level), -1 if minus else 1)
        for image, level, minus in zip(images, levels, negative, strict=True)
    ]
    assert torch.equal(torch.stack([as_tensor(picture) for picture in theirs]), ours)


@pytest.mark.parametrize(("views", "shape"), [(COLOUR, (3, 32, 32)), (GREY, (1, 28, 28))])
def test_pillow_views_are_distributed_as_ours(views: Views, shape: tuple[int, int, int]) -> None:
    """Mean and deviation of every pixel of a bright image, whose dark parts all come from augmentation."""
    image = torch.full(shape, 250, dtype=torch.uint8)
    image[:, :, : shape[2] // 2] = 60
    many = 1500
    for strength in ("weak", "strong"):
        ours = getattr(views, strength)(image.expand(many, *shape), torch.Generator().manual_seed(0))
        pillow = PillowViews(views)
        theirs = torch.stack([getattr(pillow, strength)(image) for _ in range(many)])
        assert theirs.shape == ours.shape
        assert theirs.dtype == torch.float32
        spread = ours.std(dim=0).clamp(min=0.05) / many**0.5
        assert float(((ours.mean(dim=0) - theirs.mean(dim=0)) / spread).abs().max()) < 7


def test_grey_pictures_waste_no_turn_on_their_colour() -> None:
    everything = set(randaugment.OPERATIONS)
    assert set(pillow_views.pool(as_picture(noise(3, 8, 8)))) == everything
    assert set(pillow_views.pool(as_picture(noise(1, 8, 8)))) == everything - {"color"}


def test_view_speed_tells_all_settings(tmp_path: Path) -> None:
    small = FIXMATCH_CNN._replace(images=1000)
    (table,) = view_speed(tmp_path, turns=2, workloads=[small], batches=(4, 8), images=16)
    assert [row[:3] for row in table.rows] == [
        ("28x28x1", view, batch) for view in ("weak", "strong") for batch in (4, 8)
    ]
    for facts, row in zip(table.facts["views"], table.rows, strict=True):
        assert {len(seconds) for seconds in facts["seconds"].values()} == {2}
        assert ("kornia" in facts["seconds"]) != (row[6] == NOT_INSTALLED)


def test_kornia_takes_part_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, list[dict[str, Any]]] = {}

    def stand_in(name: str) -> type[torch.nn.Module]:
        """A layer that notes how it was made and leaves images as they are."""

        class Layer(torch.nn.Identity):
            def __init__(self, *given: Any, **named: Any) -> None:
                super().__init__()
                made.setdefault(name, []).append({**named, **({"given": given} if given else {})})

        return Layer

    layers = ("RandomHorizontalFlip", "RandomCrop", "RandomErasing", "Normalize")
    policy = [[("color", 0.0, 1.0)], [("invert", 0.0, 1.0)]]
    modules = {
        "kornia.augmentation": SimpleNamespace(**{name: stand_in(name) for name in layers}),
        "kornia.augmentation.auto.rand_augment.rand_augment": SimpleNamespace(
            RandAugment=stand_in("RandAugment"), default_policy=policy
        ),
    }
    monkeypatch.setattr(views, "import_module", modules.__getitem__)
    small = FIXMATCH_CNN._replace(images=1000)
    (table,) = view_speed(tmp_path, turns=2, workloads=[small], batches=(8,), images=16)
    for facts, row in zip(table.facts["views"], table.rows, strict=True):
        assert len(facts["seconds"]["kornia"]) == 2
        assert isinstance(row[6], int)
        assert "to" in str(row[7])
    assert made["RandomHorizontalFlip"] == 2 * [{"p": 0.5}]  # of the weak and of the strong view
    assert made["RandomCrop"] == 2 * [{"given": ((28, 28),), "padding": 2, "padding_mode": "reflect"}]
    assert made["RandAugment"] == [{"n": 2, "m": 10, "policy": policy[1:]}]  # grey images have no colour
    (erased,) = made["RandomErasing"]
    assert erased["scale"] == (14 * 14 / 28**2,) * 2
    assert len(made["Normalize"]) == 2


# --- aggregation -----------------------------------------------------------------------------------------------------


def test_all_ways_give_the_same_mean() -> None:
    models, weight = cohort_of(7, (*SMALL, (200, 200)))
    expected = weighted_mean(models, weight)
    without = aggregation.mean_by_pytorch(models, weight)
    assert all(torch.equal(expected[name], without[name]) for name in expected)
    for way in aggregation.WAYS.values():
        found = way(models, weight)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor)


def test_mean_is_rounded_as_products_and_sums_are() -> None:
    """Bit for bit what a loop with temporaries gives, for every type of number and memory layout."""
    generator = torch.Generator().manual_seed(0)
    models = [
        {
            "layer": torch.randn(40, 30, generator=generator),
            "channels_last": torch.randn(4, 3, 5, 5, generator=generator).to(memory_format=torch.channels_last),
            "counter": torch.randint(0, 100, (), generator=generator),
            "half": torch.randn(9, generator=generator).half(),
        }
        for _ in range(11)
    ]
    _, weight = cohort_of(11, SMALL)
    before = [{name: tensor.clone() for name, tensor in model.items()} for model in models]
    found = weighted_mean(models, weight)
    for name, tensor in models[0].items():
        total = tensor.double() * float(weight[0])
        for model, share in zip(models[1:], weight[1:].tolist(), strict=True):
            total = total + model[name].double() * share
        exact = total if tensor.dtype.is_floating_point else total.round()
        assert torch.equal(found[name], exact.to(tensor.dtype))
        assert found[name].dtype == tensor.dtype
        assert found[name].stride() == tensor.stride()
        assert all(torch.equal(model[name], old[name]) for model, old in zip(models, before, strict=True))


def test_mean_needs_as_many_weights_as_models() -> None:
    models, weight = cohort_of(3, SMALL)
    with pytest.raises(ValueError, match="zip"):
        weighted_mean(models, weight[:2])


@pytest.mark.slow
def test_stacking_takes_the_cohort_a_second_time() -> None:
    shapes = ((500, 500), (500, 500))
    stacked = extra_memory("torch.stack, weighted sum", 40, shapes)
    ours = extra_memory("semifed", 40, shapes)
    if sys.platform != "linux":  # elsewhere nothing tells, and nothing is made up
        assert stacked is ours is None
        return
    assert stacked is not None
    assert ours is not None
    assert stacked > 0.8 * 40 * 500 * 500 * 4  # at least one of the two tensors of all clients, side by side
    assert ours < stacked / 4


def test_aggregation_table_holds_raw_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aggregation, "extra_memory", lambda way, cohort, shapes: None if "torch" in way else 25 * 10**6)
    table, checks = aggregation_cost(2, cohort=3, shapes=SMALL)
    assert [row[3] for row in table.rows] == ["25 MB", "25 MB", None, "25 MB"]
    assert all(len(seconds) == 2 for seconds in checks.facts["seconds"].values())
    assert table.facts["parameters"] == 30 + 5 + 54
    assert table.facts["bytes_held"] == 3 * 4 * 89
    assert all(len(seconds) == 2 for seconds in table.facts["seconds"].values())
    assert table.facts["largest_error"]["semifed"] < 1e-6
    json.dumps(table.facts)


# --- scaling ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def few_images(monkeypatch: pytest.MonkeyPatch) -> None:
    small = FIXMATCH_CNN._replace(images=2000, tests=20)
    monkeypatch.setattr(scaling, "FIXMATCH_CNN", small)
    monkeypatch.setattr(scaling, "STEPS", 1)


@pytest.mark.usefixtures("few_images")
def test_only_steady_rounds_count(tmp_path: Path) -> None:
    (table,) = scaling.against_participants(tmp_path, turns=1, workers=1, counts=(1, 2))
    assert table.facts["participants"] == [1, 2]
    for ((run,),) in zip(table.facts["runs"], strict=True):
        assert len(run["rounds"]) == len(run["trained"]) == len(run["server_cpu"]) == scaling.STEADY_ROUNDS
        assert all(whole > part > 0 for whole, part in zip(run["rounds"], run["trained"], strict=True))
        assert all(whole > part > 0 for whole, part in zip(run["trained"], run["exchange"], strict=True))
        assert all(whole >= part > 0 for whole, part in zip(run["exchange"], run["clients"], strict=True))
    assert "a step draws 48 images, one pass of 80 views" in table.work
    json.dumps(table.facts)


@pytest.mark.usefixtures("few_images")
def test_every_client_of_the_largest_federation_fills_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a step would become cheaper as clients become more."""
    seen: list[Parts] = []

    def look(workload: workload.Workload, folder: Path, settings: tuple[str, ...]) -> scaling.Run:
        seen.append(workload.parts(folder, *settings))
        return scaling.Run(1.0, [2.0], [1.5], 0.5, [0.1], [1.4], [2.0], 10**9, None)

    monkeypatch.setattr(scaling, "_in_fresh_process", look)
    (table,) = scaling.against_clients(tmp_path, turns=2, workers=2, clients=(50, 400))
    assert len(seen) == 4
    assert "one pass of" in table.work
    for parts in seen:
        local = parts.recipe.local
        held = [parts.scenario.client(index) for index in range(parts.recipe.scenario.clients)]
        assert min(len(data.labelled) for data in held) >= local.batch
        assert min(len(data.unlabelled) for data in held) >= local.batch * local.unlabelled_ratio
        assert parts.recipe.clients_per_round == 10
    assert [row[0] for row in table.rows] == ["50", "400"]
    assert table.rows[0][-2:] == ("1.00 GB", None)


@pytest.mark.slow
@pytest.mark.usefixtures("few_images")
def test_memory_of_workers_is_seen(tmp_path: Path) -> None:
    settings = (*scaling._few_steps(2, steady=1), "clients_per_round=2")
    run = scaling._in_fresh_process(scaling.FIXMATCH_CNN, tmp_path, settings)
    if sys.platform != "linux":
        assert run.own_memory is run.all_memory is None
        return
    assert run.own_memory is not None
    assert run.all_memory is not None
    assert run.all_memory > run.own_memory + 2 * 50e6  # two processes with torch in them


def test_the_time_between_clients_is_told() -> None:
    run = scaling.Run(1.0, [2.0], [1.9], 0.5, [0.1], exchange=[1.6], clients=[2.4], own_memory=None, all_memory=None)
    assert run.idle(workers=2) == pytest.approx(1 - 2.4 / 3.2)


@pytest.mark.usefixtures("few_images")
def test_the_table_of_workers(tmp_path: Path) -> None:
    (table,) = scaling.against_workers(tmp_path, turns=1, workers=1, steps=1)
    assert [len(row) for row in table.rows] == [len(table.header)]


@pytest.mark.usefixtures("few_images")
def test_operations_of_a_step_are_counted(tmp_path: Path) -> None:
    narrow, wide = (
        step_cost(scaling.FIXMATCH_CNN, tmp_path, 1, f"model.width={width}") for width in ("[4, 8, 16]", "[8, 16, 32]")
    )
    assert narrow.parameters < wide.parameters < 5 * narrow.parameters
    assert 2 < wide.operations / narrow.operations < 4  # later layers grow in both directions, the first in one


def test_a_client_that_is_left_out_spoils_the_measurement(tmp_path: Path) -> None:
    poor = FIXMATCH_CNN._replace(images=60, tests=20)
    settings = (*scaling._few_steps(1, steady=1), "scenario.labelled_per_class=1", "clients_per_round=60")
    with pytest.raises(RuntimeError, match="left out"):
        scaling._run(poor, tmp_path, settings)


# --- plots -----------------------------------------------------------------------------------------------------------


def table(name: str, **facts: object) -> Table:
    return Table(name, "", "", (), [], dict(facts))


def runs(*seconds: float) -> list[list[dict[str, object]]]:
    make = partial(scaling.Run, trained=[0.1], end=0.1, server_cpu=[0.1], exchange=[0.1], clients=[0.1])
    return [[make(1.0, [one], own_memory=10**9, all_memory=None)._asdict()] for one in seconds]


def test_scaling_tables_are_drawn_and_others_are_not(tmp_path: Path) -> None:
    gains = [{"median": 1.0, "low": 1.0, "high": 1.0}, {"median": 1.8, "low": 1.7, "high": 1.9}]
    tables = [
        table("views"),
        table("scaling-clients", clients=[100, 1000], runs=runs(0.2, 0.2)),
        table("scaling-participants", participants=[5, 10], runs=runs(0.2, 0.4)),
        table("scaling-workers", workers=[1, 2], runs=runs(0.4, 0.2), times_as_fast=gains),
        table("scaling-images", images_a_client=[64, 128], runs=runs(0.2, 0.4)),
        table(
            "scaling-width",
            width=["4-8", "8-16"],
            runs=runs(0.2, 0.4),
            operations_a_step={"4-8": 10**8, "8-16": 4 * 10**8},
            gflops_reached={"4-8": [5.0], "8-16": [9.0]},
            steps_a_round=8,
        ),
    ]
    drawn = draw(tables, tmp_path / "plots")
    assert [path.name for path in drawn] == [f"{one.name}.png" for one in tables[1:]]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


def test_every_line_shows_the_range_of_its_turns() -> None:
    from matplotlib.figure import Figure

    axis = Figure().subplots()
    slow, quick = runs(0.4, 0.8), runs(0.2, 0.6)
    both = [one + other for one, other in zip(slow, quick, strict=True)]
    plots._participants(axis, {"participants": [5, 10], "runs": both})
    (bars,) = [one for one in axis.containers if isinstance(one, ErrorbarContainer)]
    line, _, (segments,) = bars
    assert [round(float(y), 6) for y in line.get_ydata()] == [0.3, 0.7]
    assert [[round(float(y), 6) for _, y in ends] for ends in segments.get_segments()] == [[0.2, 0.4], [0.6, 0.8]]

"""The floor does the work of a real round, no more and no less."""

from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from semifed.assembly import workplace_of
from semifed.bench import precision
from semifed.bench.floor import LARGE, Measured, _share, against_floor, large_products, seconds_of_a_test
from semifed.bench.measuring import ratio, spread, take_turns
from semifed.bench.precision import lower_precision
from semifed.bench.replaying import Replayer
from semifed.bench.rounds import RoundTime, TimedEngine, run_rounds
from semifed.bench.watching import Pass, Watched, watch
from semifed.bench.work import Work, watch_steady, work_in
from semifed.bench.workload import FASHION, FIXMATCH_CNN, OPENFL_CNN, SAGE_CNN, Workload
from semifed.engines.local import LocalEngine
from semifed.kernels import normalise
from semifed.kernels.normalise import Scale
from semifed.methods.openfl import OpenFL, Sent
from semifed.net import Net
from semifed.payloads import Prediction
from semifed.process import computes_bfloat16
from semifed.wire import Weights

TINY = ("scenario.clients=4", "clients_per_round=2", "local.batch=4", "rounds=1", "evaluate.every=1")


def tiny(load: Workload) -> Workload:
    cut = {
        "FixMatch": ("scenario.labelled_per_class=8", "local.steps=3"),
        "SAGE": ("scenario.labelled_per_class=8", "local.steps=3"),
        "OpenFL": ("local.epochs=1", "scenario.labelled_per_class=5", "server.batch=15", "model.width=[4,4,4]"),
    }[load.name.partition(",")[0]]
    return load._replace(overrides=(*load.overrides, *TINY, *cut), images=200, tests=20)


def test_the_passes_of_fixmatch(tmp_path: Path) -> None:
    seen = watch(tiny(FIXMATCH_CNN).parts(tmp_path), round_=1)
    # Two clients of three steps: 4 labelled, 8 weak and 8 strong images in one pass.
    assert seen.clients == 6 * ((Pass(20, True),),)
    assert seen.server == ()


def test_the_teacher_of_sage_is_a_pass_without_gradient(tmp_path: Path) -> None:
    seen = watch(tiny(SAGE_CNN).parts(tmp_path), round_=1)
    assert seen.clients == 6 * ((Pass(20, True), Pass(8, False)),)


def test_gates_are_no_part_of_openfls_steps_and_the_server_has_its_own(tmp_path: Path) -> None:
    seen = watch(tiny(OPENFL_CNN).parts(tmp_path), round_=1)
    # 200 images, 30 of them labelled at the server: each of four clients holds 42 or 43, in steps of three views of 4.
    assert {len(step) for step in seen.clients} == {3}
    assert {one for step in seen.clients for one in step} <= {Pass(4, True), Pass(3, True), Pass(2, True)}
    # Three epochs of two batches; two weak and two strong views of 15.
    assert seen.server == 6 * (4 * (Pass(15, True),),)
    assert set(seen.shares) == {"steps", "views", "gates", "rest"}
    assert sum(seen.shares.values()) == pytest.approx(1)
    assert min(seen.shares.values()) > 0


def test_the_round_that_is_watched_is_of_the_kind_that_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenFL aligns from its second round on, and never in a run of one: its steps cost more then."""
    aligning: list[bool] = []
    prepare = OpenFL.prepare

    def noted(self: OpenFL, net: Net, down: Sent, *given: Any) -> Any:
        aligning.append(bool(down.aligning))
        return prepare(self, net, down, *given)

    monkeypatch.setattr(OpenFL, "prepare", noted)
    load = tiny(OPENFL_CNN)
    seen = watch_steady(load, tmp_path)
    assert aligning == [False, False, True, True]  # two clients in each of two rounds, then it has seen enough
    once = watch(load.parts(tmp_path), round_=1)
    assert len(seen.clients) == len(once.clients)  # those of one round only
    assert seen.server == once.server
    assert seen.images == once.images


def test_the_floor_shares_the_servers_passes_out() -> None:
    step = tuple(Pass(size, True) for size in (1, 2, 3, 4))
    server = (step, step[:1])
    assert [_share(server, one, 2) for one in range(2)] == [((step[0], step[2]), step[:1]), ((step[1], step[3]),)]
    assert _share(server, 0, 1) == server


def test_work_is_counted_pass_by_pass(tmp_path: Path) -> None:
    load = tiny(SAGE_CNN)
    teacher, student = Pass(8, False), Pass(20, True)
    one, two = (work_in(Watched(count * ((student, teacher),), (), 12, {}), load, tmp_path) for count in (1, 2))
    assert (two.steps, two.passes, two.views) == (2, 4, 2 * 28)
    assert two.gflop == pytest.approx(2 * one.gflop)
    alone = work_in(Watched(((student,),), (), 12, {}), load, tmp_path)
    assert 0 < alone.gflop < one.gflop


def test_a_test_is_that_of_the_engine(tmp_path: Path) -> None:
    asked: list[int] = []

    class Engine(TimedEngine):
        def predict(self, weights: Weights, images: Tensor) -> Prediction | None:
            asked.append(len(images))
            return super().predict(weights, images)

    parts = tiny(FIXMATCH_CNN).parts(tmp_path)
    assert seconds_of_a_test(parts, Engine(LocalEngine(workplace_of(parts), parts.scenario, 1))) > 0
    assert asked == [20, 20]  # the first one does not count


def test_replaying_moves_every_weight_and_only_by_the_steps_that_learn(tmp_path: Path) -> None:
    place = workplace_of(tiny(OPENFL_CNN).parts(tmp_path))()
    before = place.net.state()
    Replayer(place, FASHION, [((Pass(4, True), Pass(3, False)),)]).replay(0)
    after = place.net.state()
    trained = set(place.net.trained_names())
    assert {name for name in before if not torch.equal(before[name], after[name])} == trained


def test_one_floor_is_pytorch_s_and_one_computes_as_semifed_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered: list[bool] = []

    def noted(x: Tensor, scale: Scale, *given: Any) -> bool:
        offered.append(scale.kernels)
        return False

    monkeypatch.setattr(normalise, "_fits", noted)
    replayer = Replayer(workplace_of(tiny(SAGE_CNN).parts(tmp_path))(), FASHION, [((Pass(4, True), Pass(3, False)),)])
    replayer.replay(0)
    assert offered == 6 * [False]  # three batch norms of the network, three of its teacher
    replayer.replay(0, kernels=True)
    assert offered[6:] == 6 * [True]


def test_a_run_says_where_each_round_went(tmp_path: Path) -> None:
    load = tiny(FIXMATCH_CNN)
    times = run_rounds(load._replace(overrides=(*load.overrides, "rounds=3")).parts(tmp_path), workers=1).rounds
    assert len(times) == 3
    for one in times:
        assert (one.steps, one.images) == (2 * 3, 2 * 3 * 12)
        assert 0 < one.clients <= one.exchange <= one.whole


def test_all_of_the_workers_time_is_accounted_for() -> None:
    shares = {"steps": 0.7, "views": 0.2, "gates": 0.0, "rest": 0.1}
    steady = RoundTime(whole=2.0, exchange=1.5, clients=2.4, steps=1, images=1)
    work = Work(1, 1, 1, 1, 1.0)
    where = Measured(Watched((), (), 1, shares), work, [1.0], [1.0], [[steady, steady]], [0.1], [0.01]).where(workers=2)
    assert sum(where.values()) == pytest.approx(1)
    assert where["server"] == pytest.approx(0.5 / 2.0)
    assert where["idle"] == pytest.approx((2 * 1.5 - 2.4) / 4.0)
    assert where["views"] == pytest.approx(0.2 * 2.4 / 4.0)


def test_operations_of_large_products_are_those_that_pytorch_counts() -> None:
    for kind, compute in large_products().items():
        with FlopCounterMode(display=False) as counter:
            compute()
        assert LARGE[kind] == pytest.approx(counter.get_total_flops() / 1e9)


@pytest.mark.slow
def test_the_tables_of_the_floor(tmp_path: Path) -> None:
    reached, where = against_floor(tmp_path, 1, 2, [tiny(FIXMATCH_CNN)])
    assert len(reached.rows) == len(where.rows) == 1
    assert len(reached.rows[0]) == len(reached.header)
    assert len(where.rows[0]) == len(where.header)
    facts = reached.facts[FIXMATCH_CNN.name]
    middle = median(one["whole"] for one in facts["rounds"][0])
    assert facts["share"]["median"] == pytest.approx(facts["floor"][0] / middle)
    assert facts["own_share"]["median"] == pytest.approx(facts["own_floor"][0] / middle)
    speed = facts["work"]["gflop"] / middle  # GFLOP a second
    assert facts["of_processor"]["median"] == pytest.approx(speed * facts["products"][0])
    assert 0 < facts["of_processor"]["median"] < 1


@pytest.mark.slow
def test_the_table_of_precisions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if computes_bfloat16("cpu"):
        (table,) = lower_precision(tmp_path, 1, 1, [tiny(SAGE_CNN)])
        assert [len(row) for row in table.rows] == [len(table.header)]
        assert {name: len(taken) for name, taken in table.facts["seconds"][SAGE_CNN.name].items()} == {
            "float32": 1,
            "bfloat16": 1,
        }
    monkeypatch.setattr(precision, "computes_bfloat16", lambda _: False)
    (table,) = lower_precision(tmp_path, 1, 1, [tiny(SAGE_CNN)])
    assert not table.rows
    assert "cannot" in table.notes[0]


def test_contestants_take_turns_and_nobody_is_always_first() -> None:
    order: list[str] = []

    def contestant(name: str) -> float:
        order.append(name)
        return float(len(order))

    seconds = take_turns({"a": lambda: contestant("a"), "b": lambda: contestant("b")}, 3)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert seconds == {"a": [1.0, 4.0, 5.0], "b": [2.0, 3.0, 6.0]}


def test_a_ratio_is_taken_inside_a_turn() -> None:
    # The machine was ten times as slow in the second turn: the ratio does not care.
    assert ratio([2.0, 20.0], [1.0, 10.0]) == spread([2.0, 2.0])

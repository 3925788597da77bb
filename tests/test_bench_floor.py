"""The floor does the work of a real round, no more and no less."""

from pathlib import Path
from statistics import median

import pytest
import torch

from semifed.assembly import workplace_of
from semifed.bench import precision
from semifed.bench.floor import Measured, Replayer, against_floor
from semifed.bench.measuring import ratio, spread, take_turns
from semifed.bench.precision import lower_precision
from semifed.bench.rounds import RoundTime, run_rounds
from semifed.bench.watching import Pass, Watched, watch
from semifed.bench.workload import FASHION, FIXMATCH_CNN, OPENFL_CNN, SAGE_CNN, Workload
from semifed.process import computes_bfloat16

TINY = ("scenario.clients=4", "clients_per_round=2", "local.batch=4", "rounds=1", "evaluate.every=1")


def tiny(load: Workload) -> Workload:
    cut = {
        "FixMatch": ("scenario.labelled_per_class=8", "local.steps=3"),
        "SAGE": ("scenario.labelled_per_class=8", "local.steps=3"),
        "OpenFL": ("local.epochs=1", "scenario.labelled_per_class=5", "server.batch=15", "model.width=[4,4,4]"),
    }[load.name.partition(",")[0]]
    return load._replace(overrides=(*load.overrides, *TINY, *cut), images=200, tests=20)


def test_the_passes_of_fixmatch(tmp_path: Path) -> None:
    seen = watch(tiny(FIXMATCH_CNN).parts(tmp_path))
    # Two clients of three steps: 4 labelled, 8 weak and 8 strong images in one pass.
    assert seen.clients == 6 * ((Pass(20, True),),)
    assert seen.server == ()


def test_the_teacher_of_sage_is_a_pass_without_gradient(tmp_path: Path) -> None:
    seen = watch(tiny(SAGE_CNN).parts(tmp_path))
    assert seen.clients == 6 * ((Pass(20, True), Pass(8, False)),)


def test_gates_are_no_part_of_openfls_steps_and_the_server_has_its_own(tmp_path: Path) -> None:
    seen = watch(tiny(OPENFL_CNN).parts(tmp_path))
    # 200 images, 30 of them labelled at the server: each of four clients holds 42 or 43, in steps of three views of 4.
    assert {len(step) for step in seen.clients} == {3}
    assert {one for step in seen.clients for one in step} <= {Pass(4, True), Pass(3, True), Pass(2, True)}
    # Three epochs of two batches; two weak and two strong views of 15.
    assert seen.server == 6 * (4 * (Pass(15, True),),)
    assert set(seen.shares) == {"steps", "views", "gates", "rest"}
    assert sum(seen.shares.values()) == pytest.approx(1)
    assert min(seen.shares.values()) > 0


def test_replaying_moves_every_weight_and_only_by_the_steps_that_learn(tmp_path: Path) -> None:
    place = workplace_of(tiny(OPENFL_CNN).parts(tmp_path))()
    before = place.net.state()
    Replayer(place, FASHION, [((Pass(4, True), Pass(3, False)),)]).replay(0)
    after = place.net.state()
    trained = set(place.net.trained_names())
    assert {name for name in before if not torch.equal(before[name], after[name])} == trained


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
    where = Measured(Watched((), (), shares), 1.0, [1.0], [[steady, steady]], [0.1]).where(workers=2)
    assert sum(where.values()) == pytest.approx(1)
    assert where["server"] == pytest.approx(0.5 / 2.0)
    assert where["idle"] == pytest.approx((2 * 1.5 - 2.4) / 4.0)
    assert where["views"] == pytest.approx(0.2 * 2.4 / 4.0)


@pytest.mark.slow
def test_the_tables_of_the_floor(tmp_path: Path) -> None:
    reached, where = against_floor(tmp_path, 1, 2, [tiny(FIXMATCH_CNN)])
    assert len(reached.rows) == len(where.rows) == 1
    assert len(reached.rows[0]) == len(reached.header)
    assert len(where.rows[0]) == len(where.header)
    facts = reached.facts[FIXMATCH_CNN.name]
    middle = median(one["whole"] for one in facts["rounds"][0])
    assert facts["share"]["median"] == pytest.approx(facts["floor"][0] / middle)


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

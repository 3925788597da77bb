"""Clients and workers that die, hang, diverge or lie: the round goes on without them, and says so."""

import multiprocessing as mp
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from command import assert_same_weights, surroundings, tiny_tables
from semifed import run
from semifed.assembly import Parts, build_workplace, prepare_run, workplace_of
from semifed.client_round import Reply, Workplace
from semifed.data.client import ClientData
from semifed.engines import pool, worker
from semifed.engines.local import LocalEngine
from semifed.errors import ClientFailure, UserError
from semifed.fit import Fitted
from semifed.methods.fedfixmatch import FedFixMatch, Labels
from semifed.net import Net
from semifed.payloads import Down, Local, Nothing, Up, Visit
from semifed.progress import Silent
from semifed.recipe import Recipe, check_recipe
from semifed.rng import numpy_stream
from semifed.run import execute
from semifed.rundir import RunDirectory

ALWAYS = 1_000


@dataclass(frozen=True, kw_only=True)
class Faulty(FedFixMatch):
    """FedFixMatch with one client that goes wrong the first few times it is asked."""

    image: int  # one the client holds
    fault: str
    times: int
    marks: str  # a directory with a file for each time

    def strikes(self, data: ClientData) -> bool:
        if self.image not in data.unlabelled.tolist():
            return False
        before = len(os.listdir(self.marks))
        if before < self.times:
            Path(self.marks, f"{before}").touch()
        return before < self.times

    def prepare(
        self, net: Net, down: Down, data: ClientData, kept: Nothing | None, visit: Visit
    ) -> Local[Labels, Nothing]:
        if self.fault in ("exit", "kill", "hang", "diverge") and self.strikes(data):
            match self.fault:
                case "exit":
                    os._exit(3)
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "hang":
                    time.sleep(600)
                case "diverge":
                    net.load({name: torch.full_like(tensor, torch.nan) for name, tensor in net.trained().items()})
                    return Local(
                        data,
                        Labels(
                            torch.zeros(len(data.unlabelled), dtype=torch.int64),
                            torch.ones(len(data.unlabelled), dtype=torch.bool),
                        ),
                        Nothing(),
                    )
        return super().prepare(net, down, data, kept, visit)

    def report(self, net: Net, local: Local[Labels, Nothing], fitted: Fitted) -> Up:
        up = super().report(net, local, fitted)
        if self.fault in LIES and self.strikes(local.data):
            name = sorted(up.weights)[0]
            weights = dict(up.weights)
            match self.fault:
                case "NaN":
                    weights[name] = torch.full_like(weights[name], torch.nan)
                case "shape":
                    weights[name] = torch.zeros(7)
                case "type":
                    weights[name] = weights[name].double()
                case "name":
                    weights["foreign"] = weights[name]
                case "surplus":
                    weights |= {name: array for name, array in net.state().items() if name not in weights}
            return up._replace(weights=weights)
        return up


LIES = {
    "NaN": "holds NaN or infinity",
    "shape": r"is torch.float32 \[7\], expected",
    "type": "is torch.float64",
    "name": "weights named 'foreign' were never sent out",
    "surplus": "were not asked for",
}


def faulty_workplace(faults: dict[str, Any], parts: Parts) -> Workplace:
    return workplace_of(parts)()._replace(method=Faulty(threshold=0.1, **faults))


def unable_workplace(how: str) -> Workplace:
    """Builds well in the parent and never in a worker."""
    if mp.parent_process() is not None:
        if how == "raises":
            raise MemoryError("no room for a network")
        os._exit(4)
    recipe = tiny(1)
    return build_workplace(recipe, (1, 8, 8), 10)


def tiny(workers: int, **changes: Any) -> Recipe:
    engine = {"workers": workers, **changes.pop("engine", {})}
    return check_recipe({**tiny_tables(), "engine": engine, **changes})


class Heard(Silent):
    """Remembers warnings."""

    def __init__(self) -> None:
        super().__init__(Console(stderr=True))
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def disturbed(
    monkeypatch: pytest.MonkeyPatch, out: Path, recipe: Recipe, fault: str, times: int, *, resume: bool = False
) -> tuple[int, list[dict[str, Any]], list[str]]:
    """A run in which one client of the first round goes wrong: that client, the rounds, the warnings."""
    parts = prepare_run(recipe)
    client = first_cohort(recipe)[1]
    marks = out.with_name(f"{out.name}-marks")
    marks.mkdir(exist_ok=True)
    image = int(parts.scenario.holdings[client].unlabelled[0])
    faults = {"image": image, "fault": fault, "times": times, "marks": str(marks)}
    heard = Heard()
    with monkeypatch.context() as patch:
        patch.setattr(run, "workplace_of", partial(partial, faulty_workplace, faults))
        execute(parts, out, heard, resume=resume)
    return client, RunDirectory(out).rounds(), heard.warnings


def first_cohort(recipe: Recipe) -> list[int]:
    rng = numpy_stream(recipe.seed, 1, "cohort")
    return sorted(rng.choice(recipe.scenario.clients, recipe.cohort_size, replace=False).tolist())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "undisturbed"
    execute(prepare_run(tiny(1)), out, Heard())
    return out


@pytest.fixture(params=["two workers", "one with its next client waiting", "and answers read late"])
def pooled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Recipe]:
    """Recipes whose clients run in worker processes."""
    if request.param == "two workers":
        return partial(tiny, 2)
    if request.param == "and answers read late":  # the worker dies before its last answer is unpacked
        monkeypatch.setattr(pool.Pool, "_with_news", slowly(pool.Pool._with_news))
    monkeypatch.setattr(pool, "AHEAD", 0)
    return partial(tiny, 1, engine={"timeout": 60.0})


def slowly(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def slow(self: Any) -> Any:
        found = function(self)
        time.sleep(0.4)
        return found

    return slow


@pytest.mark.parametrize("fault", ["exit", "kill"])
@pytest.mark.slow
def test_a_client_whose_worker_dies_once_is_redone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, undisturbed: Path, pooled: Callable[..., Recipe], fault: str
) -> None:
    _, rounds, warnings = disturbed(monkeypatch, tmp_path / "run", pooled(), fault, 1)
    assert len(list((tmp_path / "run-marks").iterdir())) == 1
    assert all(line["failures"] == [] for line in rounds)
    assert warnings == []
    assert_same_weights(tmp_path / "run", undisturbed)


@pytest.mark.slow
def test_a_client_whose_worker_always_dies_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pooled: Callable[..., Recipe]
) -> None:
    client, rounds, warnings = disturbed(monkeypatch, tmp_path / "run", pooled(), "kill", ALWAYS)
    assert [line["round"] for line in rounds] == [0, 1, 2, 3, 4]
    assert rounds[1]["failures"] == [{"client": client, "reason": "its worker process died 2 times"}]
    assert client not in rounds[1]["clients"]
    assert len(rounds[1]["clients"]) == 2
    assert warnings[0] == f"round 1: client {client} was left out: its worker process died 2 times"


@pytest.mark.parametrize("ahead", [pool.AHEAD, 0])
@pytest.mark.slow
def test_a_client_that_hangs_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ahead: int) -> None:
    monkeypatch.setattr(pool, "AHEAD", ahead)
    recipe = tiny(1, rounds=1, engine={"timeout": 5.0})
    client, rounds, warnings = disturbed(monkeypatch, tmp_path / "run", recipe, "hang", ALWAYS)
    assert rounds[1]["failures"] == [{"client": client, "reason": "no answer within 5 s"}]
    assert len(rounds[1]["clients"]) == 2
    assert len(warnings) == 1


def test_a_client_that_diverges_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    client, rounds, _ = disturbed(monkeypatch, tmp_path / "run", tiny(1), "diverge", 1)
    assert rounds[1]["failures"] == [{"client": client, "reason": "the loss became nan in step 1"}]
    assert rounds[2]["failures"] == []
    assert all(line["loss"]["total"] is not None for line in rounds[1:])


@pytest.mark.parametrize("lie", LIES)
def test_an_update_that_cannot_be_averaged_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lie: str
) -> None:
    client, rounds, warnings = disturbed(monkeypatch, tmp_path / "run", tiny(1), lie, 1)
    (failure,) = rounds[1]["failures"]
    assert failure["client"] == client
    assert re.search(f"its update was refused: .*{LIES[lie]}", failure["reason"])
    assert len(warnings) == 1
    assert rounds[4]["metrics"]["accuracy"] is not None


@pytest.mark.slow
def test_too_few_clients_end_the_run_which_can_be_resumed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, undisturbed: Path
) -> None:
    recipe = tiny(2, min_clients=3)
    told = (
        r"round 1: only 2 of 3 clients delivered, min_clients is 3; the last finished round is kept, and --resume with "
        r"a smaller min_clients goes on from it \(client \d+: its"
    )
    with pytest.raises(UserError, match=told):
        disturbed(monkeypatch, tmp_path / "run", recipe, "exit", ALWAYS)
    assert [line["round"] for line in RunDirectory(tmp_path / "run").rounds()] == [0]
    disturbed(monkeypatch, tmp_path / "run", recipe, "exit", 0, resume=True)
    assert_same_weights(tmp_path / "run", undisturbed)


def test_clients_without_images_are_announced_and_left_out(tmp_path: Path) -> None:
    """20 labels at the server; eight images for six clients make two with two and four with one."""
    scenario = {**tiny_tables()["scenario"], "subset": 28}
    heard = Heard()
    execute(prepare_run(tiny(1, scenario=scenario, clients_per_round=6)), tmp_path / "few", heard)
    rounds = RunDirectory(tmp_path / "few").rounds()
    assert heard.warnings[0] == "4 clients hold fewer than 2 images and will be left out: 2, 3, 4, 5"
    assert [failure["reason"] for failure in rounds[1]["failures"]] == ["it holds 1 image, training needs 2"] * 4
    assert rounds[1]["clients"] == [0, 1]

    scenario["subset"] = 23
    with pytest.raises(UserError, match=r"only 0 of 3 clients delivered, min_clients is 1.*it holds [01] image"):
        execute(prepare_run(tiny(1, scenario=scenario)), tmp_path / "none", Heard())
    execute(prepare_run(tiny(1, scenario=scenario, min_clients=0)), tmp_path / "zero", Heard())
    reasons = {failure["reason"] for line in RunDirectory(tmp_path / "zero").rounds() for failure in line["failures"]}
    assert reasons == {"it holds 0 images, training needs 2", "it holds 1 image, training needs 2"}


def same_replies(one: Sequence[Reply | ClientFailure], two: Sequence[Reply | ClientFailure]) -> bool:
    return all(
        isinstance(a, Reply)
        and isinstance(b, Reply)
        and all(torch.equal(a.up.weights[name], b.up.weights[name]) for name in a.up.weights)
        for a, b in zip(one, two, strict=True)
    )


@pytest.mark.slow
def test_workers_that_die_while_idle_are_replaced() -> None:
    recipe = tiny(2)
    parts = prepare_run(recipe)
    build = partial(build_workplace, recipe, (1, 8, 8), 10)
    engine = LocalEngine(build, parts.scenario, workers=2)
    try:
        down = Down(build().net.state())
        before = engine.ask(1, 0.1, [0, 1, 2], down)
        for child in mp.active_children():
            os.kill(child.pid or 0, signal.SIGKILL)
            child.join()
        assert same_replies(engine.ask(1, 0.1, [0, 1, 2], down), before)
    finally:
        engine.close()
    assert mp.active_children() == []


@pytest.mark.slow
def test_a_worker_that_dies_before_its_last_answer_is_unpacked_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of an answer goes with its worker; it was taken for granted that another client had killed it."""
    lost: list[Any] = []
    answered = pool._Worker.answer

    def losing(worker: pool._Worker) -> Any:
        answer = answered(worker)
        if lost or worker.jobs:
            return answer
        lost.append(answer)
        worker.process.kill()
        worker.process.join()
        return pool._Lost()

    recipe = tiny(2)
    build = partial(build_workplace, recipe, (1, 8, 8), 10)
    engine = LocalEngine(build, prepare_run(recipe).scenario, workers=2)
    try:
        down = Down(build().net.state())
        undisturbed = engine.ask(1, 0.1, [0], down)
        monkeypatch.setattr(pool._Worker, "answer", losing)
        assert same_replies(engine.ask(1, 0.1, [0], down), undisturbed)
        assert len(lost) == 1
    finally:
        engine.close()


def test_what_the_machine_lacks_is_told_without_a_traceback() -> None:
    told = worker.Crash.of(UserError("3.0 MB do not fit")).error("client 3 failed")
    assert (type(told), str(told)) == (UserError, "3.0 MB do not fit")
    ours = worker.Crash.of(ValueError("no such axis")).error("client 3 failed")
    assert isinstance(ours, RuntimeError)
    assert str(ours).startswith("client 3 failed:\nValueError: no such axis")


def test_too_little_shared_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")

    monkeypatch.setattr(torch.Tensor, "share_memory_", full)
    parts = prepare_run(tiny(1))
    with pytest.raises(UserError, match=r"MB do not fit .* No space left .* or use engine.workers=1$"):
        LocalEngine(partial(unable_workplace, "raises"), parts.scenario, workers=2)


@pytest.mark.parametrize(("how", "told"), [("raises", "no room for a network"), ("exits", "died while starting")])
def test_workers_that_cannot_start_are_not_started_for_ever(how: str, told: str) -> None:
    parts = prepare_run(tiny(1))
    engine = LocalEngine(partial(unable_workplace, how), parts.scenario, workers=2)
    try:
        with pytest.raises(RuntimeError, match=told):
            engine.ask(1, 0.1, [0, 1, 2], Down(unable_workplace(how).net.state()))
    finally:
        engine.close()


@pytest.mark.slow
def test_no_client_waits_behind_another_where_its_order_would_fill_the_pipe(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, undisturbed: Path
) -> None:
    """A parent that waits for room in the pipe of a worker that waits for room in it would wait for ever."""
    waiting: list[int] = []
    send = pool._Worker.send

    def counted(worker: pool._Worker, job: Any, memory: torch.Tensor, layout: Any) -> None:
        waiting.append(len(worker.jobs))
        send(worker, job, memory, layout)

    monkeypatch.setattr(pool._Worker, "send", counted)
    monkeypatch.setattr(pool, "AHEAD", 0)
    for light, most in ((0, 0), (pool.LIGHT, 1)):
        waiting.clear()
        monkeypatch.setattr(pool, "LIGHT", light)
        execute(prepare_run(tiny(2)), tmp_path / str(light), Heard())
        assert max(waiting) == most
        assert_same_weights(tmp_path / str(light), undisturbed)


@pytest.mark.slow
def test_workers_amid_a_long_client_die_with_their_parent(tmp_path: Path) -> None:
    """A parent killed by the system leaves nobody behind who would compute for nobody."""
    program = tmp_path / "parent.py"
    program.write_text(
        f"import sys\nsys.path[:0] = [{str(Path(__file__).parent)!r}]\n"
        "import multiprocessing as mp\nfrom pathlib import Path\nfrom threading import Timer\nimport pytest\n"
        "from test_engine_faults import disturbed, tiny\n"
        "def tell(): print(*(child.pid for child in mp.active_children()), flush=True)\n"
        "if __name__ == '__main__':\n"
        "    marks = Path('run-marks')\n"
        "    def when_struck():\n"
        "        if marks.exists() and any(marks.iterdir()): return tell()\n"
        "        timer = Timer(0.1, when_struck)\n"
        "        timer.daemon = True\n"
        "        timer.start()\n"
        "    when_struck()\n"
        "    disturbed(pytest.MonkeyPatch(), Path('run').absolute(), tiny(2), 'hang', 1)\n"
    )
    with subprocess.Popen(
        [sys.executable, str(program)], cwd=tmp_path, env=surroundings(), stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        try:
            workers = [int(word) for word in parent.stdout.readline().split()]
        finally:
            parent.kill()
        assert len(workers) == 2
        end = time.monotonic() + 60
        while any(Path(f"/proc/{worker}").exists() for worker in workers):
            assert time.monotonic() < end
            time.sleep(0.05)

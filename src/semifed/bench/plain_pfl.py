# pfl is optional, and has no types.
# mypy: disable-error-code="import-not-found, import-untyped, misc"
"""Federated training as a user of pfl-research writes it: a module with a loss, a federated data set, its own FedAvg.

What a client computes is plain PyTorch: on semifed's batches and views with its SGD, so that a comparison shows the
engines, or as papers' code has it, image by image from new data loaders, so that it shows what people use now. pfl
works in one process, or in several that torchrun starts and that add up their sums:

    python -m torch.distributed.run --standalone --nproc-per-node=2 -m semifed.bench.plain_pfl recipe.toml 3 out.json

with a further word, naive, for clients of the second kind.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn

from semifed.assembly import Parts, prepare_run
from semifed.bench.naive import LAYOUT, loaded
from semifed.bench.plain_loop import Job, Lap, QuickSGD, StepViews, batchwise, new_network, step_loss
from semifed.data.client import ClientData
from semifed.durable import write_atomically
from semifed.errors import UserError
from semifed.process import settle
from semifed.recipe import check_recipe
from semifed.rng import Key

NAIVE = "naive"  # said to processes whose clients are papers' code


class TwoKinds(Dataset):
    """A user's labelled and unlabelled images: pfl slices all of a user's tensors alike, so this draws the batches."""

    def __init__(self, steps: Callable[..., Iterator[StepViews]], data: ClientData, job: Job, *address: Key) -> None:
        super().__init__((data.labelled, data.unlabelled))
        self._steps, self._data, self._job, self._address = steps, data, job, address

    def __len__(self) -> int:
        return self._data.image_count

    def iter(self, batch_size: int | None) -> Iterator[StepViews]:
        """Steps of a round, whatever the batch size."""
        return self._steps(self._data, self._job, "plain pfl", *self._address)


class TrainedModule(nn.Module):
    """The network with its loss, as pfl asks for it."""

    def __init__(self, network: nn.Module, job: Job) -> None:
        super().__init__()
        self.network, self._job = network, job
        self.steps = self.images = 0

    def loss(self, labelled: Tensor, labels: Tensor, weak: Tensor, strong: Tensor) -> Tensor:
        """What a step minimises."""
        self.steps, self.images = self.steps + 1, self.images + len(labelled) + len(weak)
        return step_loss(self.network, StepViews(labelled, labels, weak, strong), self._job)

    def metrics(self, labelled: Tensor, labels: Tensor, weak: Tensor, strong: Tensor) -> dict[str, Any]:
        """Next to nothing: pfl insists on measuring in the first round, which does not count."""
        return {"images": Weighted(len(labelled), len(labelled))}


class Clock(TrainingProcessCallback):
    """Notes when each round ended."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def on_train_begin(self, *, model: Any) -> Any:
        """Ready."""
        self.marks.append(perf_counter())
        return Metrics()

    def after_central_iteration(self, aggregate_metrics: Any, model: Any, *, central_iteration: int) -> Any:
        """A round is over."""
        self.marks.append(perf_counter())
        return False, Metrics()


def pfl_rounds(parts: Parts, steady: int, *, naive: bool = False) -> Lap:
    """Some rounds in pfl's simulation in this process, and one before them."""
    if not naive:
        settle()
    began = perf_counter()
    job, recipe = Job.of(parts), parts.recipe
    network = new_network(parts, LAYOUT) if naive else new_network(parts)
    module = TrainedModule(network.train(), job)
    local_sgd: Callable[..., Any] = torch.optim.SGD if naive else QuickSGD
    model = PyTorchModel(
        module,
        lambda parameters, lr: local_sgd(parameters, **{**job.sgd, "lr": lr}),
        torch.optim.SGD(module.parameters(), lr=1.0),
    )
    visits = count()

    def user(client: int) -> TwoKinds:
        steps = loaded if naive else batchwise
        return TwoKinds(steps, parts.scenario.client(client), job, client, next(visits))

    sampler = get_user_sampler("minimize_reuse", list(range(recipe.scenario.clients)))
    data = FederatedDataset(user, sampler)
    backend = SimulatedBackend(training_data=data, val_data=data, postprocessors=[WeightByDatapoints()])
    clock = Clock()
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)  # pfl asks for the current one, which another peer may have closed
    try:
        FederatedAveraging().run(
            backend=backend,
            model=model,
            algorithm_params=NNAlgorithmParams(
                central_num_iterations=steady + 1,
                evaluation_frequency=steady + 1,
                train_cohort_size=recipe.cohort_size,
                val_cohort_size=0,
            ),
            model_train_params=NNTrainHyperParams(
                local_num_epochs=None,
                local_num_steps=job.steps,
                local_learning_rate=job.sgd["lr"],
                local_batch_size=job.labelled,
            ),
            model_eval_params=NNEvalHyperParams(local_batch_size=job.labelled),
            callbacks=[clock],
            send_metrics_to_platform=False,
        )
    finally:
        loop.close()
        asyncio.set_event_loop(None)
    return Lap.between(began, clock.marks, module.steps, module.images)


def torchrun_rounds(parts: Parts, steady: int, processes: int, *, naive: bool = False) -> Lap:
    """The same in so many processes of one thread each."""
    began = perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        recipe, out = Path(folder, "recipe.toml"), Path(folder, "lap.json")
        recipe.write_text(parts.recipe.to_toml())
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        command = [sys.executable, *launch, "-m", __name__, str(recipe), str(steady), str(out)]
        command += [NAIVE] if naive else []
        told = {**os.environ, "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=told
        ) as running:
            try:
                said, _ = running.communicate()
            except BaseException:
                running.terminate()  # it ends its workers
                raise
        if not out.exists():  # a process may abort while it leaves the group, when all rounds are over and written down
            raise UserError(f"pfl in {processes} processes failed: {said[-2000:]}")
        lap = Lap(*json.loads(out.read_text()))
    return lap._replace(start_up=perf_counter() - began - lap.first - sum(lap.seconds))


def main(recipe: str, steady: str, out: str, clients: str = "") -> None:
    """One of the processes that torchrun starts."""
    parts = prepare_run(check_recipe(tomllib.loads(Path(recipe).read_text())))
    lap = pfl_rounds(parts, int(steady), naive=clients == NAIVE)
    done = torch.tensor([lap.steps, lap.images])
    torch.distributed.all_reduce(done)
    if torch.distributed.get_rank() == 0:
        write_atomically(Path(out), json.dumps(lap._replace(steps=int(done[0]), images=int(done[1]))))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

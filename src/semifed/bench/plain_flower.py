"""Federated training as a user of Flower writes it: a client app, a server app that averages, Ray beneath.

What a client computes is plain PyTorch: on semifed's batches and views with its SGD, so that a comparison shows the
engines, or as papers' code has it, image by image from new data loaders, so that it shows what people use now.
"""

import logging
import os
import time
import tomllib
from functools import lru_cache
from time import perf_counter
from typing import Any

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from semifed.assembly import Parts, prepare_run
from semifed.bench.naive import LAYOUT, train_naively
from semifed.bench.plain_loop import Job, Lap, QuickSGD, average, batchwise, new_network, train
from semifed.engines import flower_simulation
from semifed.errors import UserError
from semifed.process import settle
from semifed.recipe import check_recipe
from semifed.rng import numpy_stream


@lru_cache(maxsize=1)
def _parts(recipe: str) -> Parts:
    """The data, once a process."""
    return prepare_run(check_recipe(tomllib.loads(recipe)))


def client_app(recipe: str, *, naive: bool) -> ClientApp:
    """Any client: builds the network, takes the weights from the message, trains, sends them back."""
    app = ClientApp()

    @app.train()
    def train_once(message: Message, context: Context) -> Message:
        if not naive:
            settle()
        parts, client = _parts(recipe), int(context.node_config["partition-id"])
        data, job = parts.scenario.client(client), Job.of(parts)
        network = new_network(parts, LAYOUT) if naive else new_network(parts)
        received: Any = message.content["arrays"]
        network.load_state_dict(received.to_torch_state_dict())
        if naive:
            steps, images = train_naively(network, data, job, client, message.metadata.group_id)
        else:
            seen = batchwise(data, job, "plain Flower", client, message.metadata.group_id)
            steps, images = train(network, seen, job, QuickSGD(network.parameters(), **job.sgd))
        counts = MetricRecord({"num-examples": data.image_count, "steps": steps, "images": images})
        content = RecordDict({"arrays": ArrayRecord(network.state_dict()), "counts": counts})
        return Message(content, reply_to=message)

    return app


def flower_rounds(parts: Parts, steady: int, workers: int, *, naive: bool = False) -> Lap:
    """Some rounds in Flower's simulation with so many one-thread actors, and one before them."""
    from flwr import simulation  # it loads Ray

    began = perf_counter()
    laps: list[Lap] = []
    failures: list[BaseException] = []
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            laps.append(_served(grid, parts, steady, began))
        except BaseException as error:  # Flower would print it and go on
            failures.append(error)

    os.environ["OMP_NUM_THREADS"] = "1"
    logging.getLogger("flwr").setLevel(logging.ERROR)
    backend = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    clients = client_app(parts.recipe.to_toml(), naive=naive)
    with flower_simulation.ray_started(workers):
        flower_simulation.run_simulated(simulation.run_simulation, app, clients, parts.recipe.scenario.clients, backend)
    if failures:
        raise failures[0]
    if not laps:
        raise UserError("Flower's simulation ended before its first round")
    return laps[0]


def _served(grid: Grid, parts: Parts, steady: int, began: float) -> Lap:
    """The server's part."""
    settle()
    recipe, weights = parts.recipe, new_network(parts).state_dict()
    while len(nodes := sorted(grid.get_node_ids())) < recipe.scenario.clients:  # they register meanwhile
        time.sleep(0.1)
    steps = images = 0
    marks = [perf_counter()]
    for round_ in range(steady + 1):
        chosen = numpy_stream("plain Flower", round_).choice(len(nodes), recipe.cohort_size, replace=False)
        content = RecordDict({"arrays": ArrayRecord(weights)})
        orders = [Message(content, nodes[index], "train", group_id=str(round_)) for index in chosen.tolist()]
        states, counts = [], []
        for reply in grid.send_and_receive(orders):
            if reply.has_error():
                raise UserError(f"a plain Flower client failed: {reply.error.reason}")
            arrays: Any = reply.content["arrays"]
            told: Any = reply.content["counts"]
            states.append(arrays.to_torch_state_dict())
            counts.append(int(told["num-examples"]))
            steps, images = steps + int(told["steps"]), images + int(told["images"])
        weights = average(states, counts)
        marks.append(perf_counter())
    return Lap.between(began, marks, steps, images)

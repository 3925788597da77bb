"""The round loop: from a recipe to a run directory."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from pathlib import Path
from time import perf_counter
from typing import Any
from uuid import uuid4

from semifed.assembly import Parts, assemble, further_heads, optimiser, privacy_of, workplace_of
from semifed.client_round import FEWEST_IMAGES, ClientRecord, Reply
from semifed.data.datasets import Dataset, content_hash
from semifed.data.scenario import class_counts
from semifed.engines import Engine, flower_engine
from semifed.engines.letters import Setting
from semifed.engines.local import LocalEngine
from semifed.errors import ClientFailure, UserError
from semifed.evaluate import Evaluation, Evaluator
from semifed.fit import Diverged
from semifed.method import payload_types
from semifed.net import Net
from semifed.privacy import private_mean, spent
from semifed.process import available_cores, settle
from semifed.progress import Reporter
from semifed.replies import alike, believable, checked, reasons, sizes_of
from semifed.report.contact_sheet import strip
from semifed.rng import numpy_stream
from semifed.robust import defence
from semifed.rundir import RunDirectory, finite, summary
from semifed.schedule import schedule_factor
from semifed.server import ServerSite
from semifed.threshold import Threshold, rejection_threshold
from semifed.wire import Weights, size_in_bytes

IMAGES = "data.json"  # what the images of a run are, by their hash, and a name of the run that no other has
MOST_STRIPS = 60  # groups whose images are shown, the largest first


def execute(
    parts: Parts, out: Path, reporter: Reporter, *, resume: bool = False, engine: Engine | None = None
) -> dict[str, Any]:
    """Run all rounds that are not finished yet and write the run directory; the summary is returned.

    The recipe says which engine the clients run in, unless one is given.
    """
    settle()
    recipe, scenario = parts.recipe, parts.scenario
    net, evaluator = assemble(parts)
    rundir = RunDirectory(out)
    rundir.open(recipe, resume=resume)
    with ExitStack() as at_the_end:
        at_the_end.callback(rundir.close)
        at_the_end.callback(reporter.ended)

        def rounds(engine: Engine) -> dict[str, Any]:
            return RoundLoop(parts, net, engine, evaluator, rundir, reporter).run()

        try:
            if engine is not None:
                return rounds(engine)
            if recipe.engine.name == "flower":
                return _simulated(parts, rounds, rundir)
            engine = LocalEngine(workplace_of(parts), scenario, recipe.engine.workers, recipe.engine.timeout)
            at_the_end.callback(engine.close)
            return rounds(engine)
        except Diverged as error:  # a client that diverges is left out; without the server there is no round
            raise UserError(f"training at the server failed: {error}; a lower server.lr or local.lr may help") from None


def _simulated(parts: Parts, rounds: Callable[[Engine], dict[str, Any]], rundir: RunDirectory) -> dict[str, Any]:
    """The rounds in Flower's simulation."""
    recipe = parts.recipe
    outcome: dict[str, Any] = flower_engine("flower_simulation").simulate(
        rounds,
        setting_of(parts),
        parts.method,
        clients=recipe.scenario.clients,
        workers=recipe.engine.workers or available_cores(),
        timeout=recipe.engine.timeout,
        store=rundir.checkpoint.store.directory.absolute(),
    )
    return outcome


def setting_of(parts: Parts) -> Setting:
    """What clients elsewhere must know."""
    scenario = parts.scenario
    shape = tuple(scenario.dataset.x_train.shape[1:])
    return Setting(
        parts.recipe.to_toml(), shape, tuple(scenario.class_names()), scenario.views.mean, scenario.views.std
    )


class RoundLoop:
    """Rounds from the last finished one to the end."""

    def __init__(
        self, parts: Parts, net: Net, engine: Engine, evaluator: Evaluator, rundir: RunDirectory, reporter: Reporter
    ) -> None:
        recipe = parts.recipe
        self.recipe, self.method, self.scenario = recipe, parts.method, parts.scenario
        self.engine, self.evaluator, self.rundir, self.reporter = engine, evaluator, rundir, reporter
        self.site = ServerSite(
            net,
            parts.scenario.server,
            optimiser(recipe)._replace(lr=recipe.server.lr or recipe.local.lr),
            batch=recipe.server.batch,
            warmup_epochs=recipe.server.warmup_epochs,
            finetune_epochs=recipe.server.finetune_epochs,
            rounds=recipe.rounds,
            seed=recipe.seed,
        )
        self._server_lr = self.site.lr
        self._client_lr = recipe.local.lr
        self._initial = net.state()
        self._defence = defence(recipe.defence.steps)
        self._privacy = privacy_of(recipe, parts.method)
        self._central = self._privacy is not None and self._privacy.mode == "central"

    def run(self) -> dict[str, Any]:
        """All rounds, then the summary, the model and the report."""
        self.site.net.helpers = self.engine.helpers()
        self.site.tell = self.reporter.stage
        server_type, *_ = payload_types(self.method)
        last = self.rundir.checkpoint.load(server_type)
        self.rundir.truncate_rounds(last and last.round, last and last.record)
        evaluation: Evaluation | None = None
        if last is None:
            self.rundir.write_json(IMAGES, {"data_hash": self._data_hash, "run": uuid4().hex})
            if self.scenario.holdings:  # nobody knows what clients elsewhere hold
                # On one line: spread over many, the counts of 100,000 clients would be 20 MB.
                self.rundir.write_bytes("partition.json", json.dumps(class_counts(self.scenario)).encode())
                self._warn_of_no_rejection()
            self._warn_of_untested_classes()
            self._warn_of_small_clients()
            server, evaluation = self._setup()
            first = 1
        else:
            self._refuse_other_images()
            server, first = last.server, last.round + 1
            self.engine.resume(last.left)
        name = (self.rundir.read_json(IMAGES) or {}).get("run")  # runs of before have none
        self.engine.begin(name, self.rundir.checkpoint.store)
        self._sizes = sizes_of(self.evaluator.said_of_one(self.site.net), self.method)
        self.reporter.started(first - 1, self.recipe.rounds)
        for round_ in range(first, self.recipe.rounds + 1):
            server, evaluation = self._round(round_, server)
        return self._finish(server, evaluation)

    @cached_property
    def _data_hash(self) -> str:
        return content_hash(self.scenario.dataset)

    def _refuse_other_images(self) -> None:
        """Another file under the same name would go unnoticed: the recipe says where images lie, not what they are."""
        begun = self.rundir.read_json(IMAGES)
        if begun is not None and begun["data_hash"] != self._data_hash:
            raise UserError(
                f"{self.rundir.path} was started with other images than {self.recipe.dataset} has now: a resumed run "
                "keeps its data; choose another --out for a new one"
            )

    def _setup(self) -> tuple[Any, Evaluation]:
        started = perf_counter()
        server = self.method.setup(self.site.net.state(), self.site)
        evaluation = self._test(server)
        self._record(0, server, evaluation, perf_counter() - started, [], {}, 0, 0)
        return server, evaluation

    def _round(self, round_: int, server: Any) -> tuple[Any, Evaluation | None]:
        started = perf_counter()
        recipe = self.recipe
        factor = schedule_factor(recipe.local.schedule, round_ - 1, recipe.rounds)
        self.site.round, self.site.lr, self.site.notes = round_, self._server_lr * factor, {}
        self._client_lr = recipe.local.lr * factor
        answers: list[Reply | ClientFailure] = []
        traffic = [0, 0]

        def ask(down: Any, /, own: Callable[[int], Any] | None = None) -> list[Any]:
            cohort = self._cohort(round_)
            letters = {} if own is None else {client: own(client) for client in cohort}
            traffic[1] += sum(map(size_in_bytes, letters.values())) + size_in_bytes(down) * (len(cohort) - len(letters))
            replies = self.engine.ask(round_, self._client_lr, cohort, down, letters)
            fresh = alike(checked(replies, down, self.site.net.trained_names(), self._sizes))
            if not self._central:  # where one client decides whether another is believed, noise for one is too little
                fresh = believable(fresh, down)
            accepted = [answer for answer in fresh if isinstance(answer, Reply)]
            # The momentum behind a refused update is as broken as the update: that client goes on from before.
            self.engine.accept(round_, accepted)
            answers.extend(fresh)
            ups = [reply.up for reply in accepted]
            traffic[0] += sum(size_in_bytes(up) for up in ups)
            if len(ups) < recipe.min_clients:
                raise UserError(
                    f"round {round_}: only {len(ups)} of {len(cohort)} clients delivered, min_clients is "
                    f"{recipe.min_clients}; the last finished round is kept, and --resume with a smaller min_clients "
                    f"goes on from it ({reasons(fresh)})"
                )
            for step in self._defence:
                ups = step(ups, down.weights)
            if self._privacy is not None and self._central:
                ups = private_mean(ups, down.weights, self._privacy, recipe.cohort_size)
            return ups

        server = self.method.round(server, ask, self.site)
        due = round_ % recipe.evaluate.every == 0 or round_ == recipe.rounds
        evaluation = self._test(server) if due else None
        replies = [answer for answer in answers if isinstance(answer, Reply)]
        changed = {reply.record.client: reply.held for reply in replies if reply.held is not None}
        self._record(round_, server, evaluation, perf_counter() - started, answers, changed, *traffic)
        return server, evaluation

    def _test(self, server: Any) -> Evaluation:
        test = partial(self.evaluator.test, self.method, self.site.net, elsewhere=self.engine.predict)
        evaluation = test(self.method.delivered(server))
        for prefix, weights in self.method.also_tested(server).items():
            beside = test(weights, foreign=False)
            evaluation.metrics.update({f"{prefix}.{name}": value for name, value in beside.metrics.items()})
        return evaluation

    def _record(
        self,
        round_: int,
        server: Any,
        evaluation: Evaluation | None,
        seconds: float,
        answers: Sequence[Reply | ClientFailure],
        changed: dict[int, Any],
        bytes_up: int,
        bytes_down: int,
    ) -> None:
        records = [answer.record for answer in answers if isinstance(answer, Reply)]
        failures = [answer for answer in answers if isinstance(answer, ClientFailure)]
        record = {
            "round": round_,
            "lr": self._client_lr,
            "server_lr": self.site.lr if self.site.labelled is not None else None,
            "clients": [one.client for one in records],
            "failures": [failure._asdict() for failure in failures],
            "loss": {**_mean_terms(records), **_mean_measured(records)},
            "metrics": evaluation.metrics if evaluation else {},
            **self.evaluator.pseudo_labels(records),
            **self.site.notes,
            "bytes_up": bytes_up,
            "bytes_down": bytes_down,
            "images": sum(one.images for one in records),
            "seconds": seconds,
        }
        record = finite(record)
        self.rundir.checkpoint.save(round_, server, record, self.engine.left, changed)
        self.rundir.append_round(record)
        for failure in failures:
            self.reporter.warn(f"round {round_}: client {failure.client} was left out: {failure.reason}")
        if round_:
            self.reporter.finished_round(record)

    def _finish(self, server: Any, evaluation: Evaluation | None) -> dict[str, Any]:
        weights = self.method.delivered(server)
        evaluation = evaluation or self.evaluator.test(self.method, self.site.net, weights)
        dataset: Dataset = self.scenario.dataset
        accept, threshold = self.recipe.evaluate.accept, self._threshold(weights)
        self.rundir.write_model(
            weights | self.site.net.frozen_weights(),
            {
                "model": self.recipe.model.model_dump(exclude_none=True, mode="json"),
                "architecture": self.site.net.network.backbone.architecture,
                "heads": further_heads(self.recipe, self.method),
                "method": self.recipe.plain()["method"],
                "image": {"channels": dataset.x_train.shape[1], "size": list(dataset.x_train.shape[2:])},
                "classes": self.scenario.class_names(),
                "mean": list(dataset.mean),
                "std": list(dataset.std),
                "threshold": threshold.value,
                "accept": accept,
                "calibrated_on": threshold.calibrated_on,
            },
            self.evaluator.labelled(self.site.net, weights) if self.method.groups_by_labels() else None,
        )
        if evaluation.scores is not None:
            self.rundir.write_json("scores.json", evaluation.scores)
        if evaluation.discovery is not None:
            self.rundir.write_json("discovery.json", evaluation.discovery)
            for number, group in enumerate(evaluation.discovery["groups"][:MOST_STRIPS]):
                self.rundir.write_bytes(f"groups/{number:02}.png", strip(self.evaluator.grouped[group["images"]]))
        drawn = self.evaluator.feature_map(self.site.net, weights, self.method.centres(server))
        self.rundir.write_json("features.json", drawn)
        facts = {
            "threshold": {"value": threshold.value, "accept": accept, **evaluation.at_threshold(threshold.value)},
            "per_class": evaluation.per_class,
            "data_hash": self._data_hash,
            "device": self.recipe.engine.device,
            "workers": getattr(self.engine, "workers", None),
            **self._spent(),
        }
        result = summary(self.recipe, self.rundir.rounds(), facts)
        self.rundir.write_json("summary.json", result)
        return result

    def _spent(self) -> dict[str, Any]:
        """What the run's protection is worth."""
        if self._privacy is None:
            return {}
        visits = _visits(self.rundir.rounds())
        size = {
            "clients": self.recipe.scenario.clients,
            "cohort": self.recipe.cohort_size,
            "rounds": self.recipe.rounds,
            "visits": max(visits.values(), default=0),
        }
        told = {"epsilon": spent(self._privacy, **size)}
        if self._central:  # whoever reads the recipe's seed knows the cohorts, and nothing is gained from sampling
            told["epsilon_known_cohorts"] = spent(self._privacy._replace(mode="local"), **size)
        return {"privacy": {**self._privacy._asdict(), **told}}

    def _threshold(self, weights: Weights) -> Threshold:
        self.site.round, self.site.lr, self.site.notes = 0, self._server_lr, {}  # as before the first round
        # Without warm-up nothing would be learnt of the images outside a fold.
        folds = self.recipe.evaluate.folds if self.recipe.server.warmup_epochs else 0
        accept = self.recipe.evaluate.accept
        validation = self.scenario.validation
        return rejection_threshold(self.method, self.site, self._initial, weights, accept, folds, validation)

    def _cohort(self, round_: int) -> list[int]:
        """The clients of a round, drawn without replacement from a stream of its own."""
        rng = numpy_stream(self.recipe.seed, round_, "cohort")
        everyone = self.recipe.scenario.clients
        return sorted(rng.choice(everyone, self.recipe.cohort_size, replace=False).tolist())

    def _warn_of_no_rejection(self) -> None:
        if self.recipe.scenario.classes == "open" and self.scenario.server is None and self.scenario.validation is None:
            self.reporter.warn(
                "the delivered model will call nothing unknown: no labels at the server to find a threshold with; "
                "scenario.validation_fraction=0.05 holds some images back for it"
            )

    def _warn_of_untested_classes(self) -> None:
        tested = set(self.scenario.test_labels.tolist())
        missing = [name for label, name in enumerate(self.scenario.class_names()) if label not in tested]
        if missing:
            self.reporter.warn(f"there are no test images of {', '.join(missing)}: accuracy says nothing of them")

    def _warn_of_small_clients(self) -> None:
        small = [
            index
            for index, held in enumerate(self.scenario.holdings)
            if len(held.labelled) + len(held.unlabelled) < FEWEST_IMAGES  # an upper bound of the distinct ones
        ]
        if small:
            shown = ", ".join(map(str, small[:10])) + (", ..." if len(small) > 10 else "")
            self.reporter.warn(
                f"{len(small)} clients hold fewer than {FEWEST_IMAGES} images and will be left out: {shown}"
            )


def _visits(rounds: Iterable[Mapping[str, Any]]) -> Counter[int]:
    """How often each client was asked: an update that was refused has left its client all the same."""
    return Counter(
        client
        for record in rounds
        for client in (*record["clients"], *(failure["client"] for failure in record["failures"]))
    )


def _mean_terms(records: Sequence[ClientRecord]) -> dict[str, float]:
    """Each term of the loss, averaged over the steps of the clients that have it."""
    terms = sorted({name for record in records for name in record.terms})
    having = {name: [record for record in records if name in record.terms] for name in terms}
    return {
        name: sum(one.terms[name] * one.steps for one in own) / max(sum(one.steps for one in own), 1)
        for name, own in having.items()
    }


def _mean_measured(records: Sequence[ClientRecord]) -> dict[str, float]:
    """What the losses measured beside their terms, averaged over all values the clients have."""
    found: dict[str, list[float]] = {}
    for name, (total, number) in (pair for record in records for pair in record.measured.items()):
        before = found.get(name, [0.0, 0.0])
        found[name] = [before[0] + total, before[1] + number]
    return {name: total / number for name, (total, number) in sorted(found.items()) if number}

"""SemiFL against plain loops: who is fixed, what is mixed, who counts, how the server moves."""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

from command import semifed
from reference.losses import cross_entropies, log_probabilities, mean_over_all
from semifed.assembly import Parts
from semifed.client_round import Reply, Task, client_round
from semifed.data.client import Batch, Budget, ClientData, batches
from semifed.fit import Loss
from semifed.losses import mixed_cross_entropy
from semifed.methods.semifl import Labelled, SemiFL
from semifed.net import Net
from semifed.payloads import Down, Local, Up, Visit
from semifed.rng import beta, torch_stream
from semifed.server_momentum import Moving, step_to_mean
from toys import equal_weights, place_of, run_toy, shaken, site_of, toy_parts, toy_recipe

CLIENT = 1


class World(NamedTuple):
    parts: Parts
    net: Net
    down: Down
    data: ClientData

    @property
    def method(self) -> SemiFL:
        assert isinstance(self.parts.method, SemiFL)
        return self.parts.method

    def prepare(self) -> Local[Labelled, Any]:
        with torch.no_grad():
            return self.method.prepare(self.net, self.down, self.data, None, Visit(0, 1, CLIENT))


def world(labels: str = "server", tables: dict[str, dict[str, Any]] | None = None, **options: Any) -> World:
    """A client that has received weights in the middle of a run; its network is in evaluation mode."""
    changes = {"method": options, **(tables or {})}
    parts = toy_parts(toy_recipe("semifl", labels, changes, rounds=2))
    net = place_of(parts).net
    noisy = shaken(net.state())
    net.load(noisy)
    return World(parts, net, Down(noisy), parts.scenario.client(CLIENT))


def reply_of(here: World) -> Reply:
    return client_round(place_of(here.parts), Task(1, CLIENT, 0.05, None), here.down, here.data)


def confidences(here: World, view: torch.Tensor) -> list[tuple[int, float]]:
    """Label and confidence, one image at a time."""
    found = []
    for image in view:
        row = here.net(image[None]).logits.detach().double()[0].tolist()
        probabilities = [math.exp(value) for value in log_probabilities(row)]
        found.append((probabilities.index(max(probabilities)), max(probabilities)))
    return found


def middle(seen: list[tuple[int, float]]) -> float:
    """A threshold between two images, half of them above it."""
    ordered = sorted(confidence for _, confidence in seen)
    return sum(ordered[len(seen) // 2 - 1 : len(seen) // 2 + 1]) / 2


# What is fixed


@pytest.mark.parametrize("gate_view", ["weak", "plain"])
def test_confident_images_are_fixed_and_all_are_reported(gate_view: str) -> None:
    here = world(gate_view=gate_view)
    raw = here.data.images[here.data.unlabelled]
    stream = torch_stream(0, 1, CLIENT, "gate")
    seen = confidences(here, here.data.views.plain(raw) if gate_view == "plain" else here.data.views.weak(raw, stream))
    threshold = middle(seen)
    here = world(gate_view=gate_view, threshold=threshold)
    local = here.prepare()
    label = [label for label, _ in seen]
    kept = [index for index, (_, confidence) in enumerate(seen) if confidence >= threshold]
    assert 0 < len(kept) < len(raw)
    assert local.const.label.tolist() == label
    assert local.const.fixed.tolist() == kept
    assert local.data.unlabelled.tolist() == [int(here.data.unlabelled[index]) for index in kept]
    assert local.const.data is here.data
    record = reply_of(here).record
    assert record.pseudo is not None
    assert record.pseudo.position.tolist() == here.data.unlabelled.tolist(), "left-out images are seen, not used"
    assert record.pseudo.label.tolist() == label
    assert record.pseudo.used.nonzero().flatten().tolist() == kept


def test_a_run_reports_every_image_of_its_cohort_as_seen(tmp_path: Path) -> None:
    here = world(threshold=0.8)
    outcome = run_toy(here.parts, tmp_path / "run")
    for line in outcome.rounds[1:]:
        held = sum(len(here.parts.scenario.client(client).unlabelled) for client in line["clients"])
        assert line["pseudo"]["seen"] == held
        assert line["pseudo"]["used"] < held
    assert max(line["pseudo"]["used"] for line in outcome.rounds[1:]) > 0


# What is mixed: without augmentation the mixture can be taken apart again

UNAUGMENTED = {"views": {"weak": "none", "strong": "none"}}


def unaugmented(**options: Any) -> tuple[World, torch.Tensor]:
    """A client sure of half of its images, and all of its images as the network sees them."""
    here = world(tables=UNAUGMENTED)
    everything = here.data.views.plain(here.data.images[here.data.unlabelled])
    return world(tables=UNAUGMENTED, threshold=middle(confidences(here, everything)), **options), everything


class Taken(NamedTuple):
    share: float
    partners: list[int]  # positions among all images of the client


def taken_apart(mixed: torch.Tensor, own: torch.Tensor, everything: torch.Tensor, at: list[int]) -> Taken:
    """Which λ and which partners make up the mixtures, found by trying every image for every row."""
    shares, partners = [], []
    pool = everything.double().flatten(1).numpy()
    for row, (mixture, image) in enumerate(
        zip(mixed.double().flatten(1).numpy(), own.double().flatten(1).numpy(), strict=True)
    ):
        if float(np.abs(mixture - image).max()) < 1e-5:
            partners.append(at[row])  # an image mixed with itself says nothing of λ
            continue
        best = (math.inf, 0.0, -1)
        for index, other in enumerate(pool):
            apart = image - other
            if index == at[row]:
                continue
            share = float((mixture - other) @ apart / (apart @ apart))
            best = min(best, (float(np.abs(mixture - other - share * apart).max()), share, index))
        assert best[0] < 1e-5, "no image of the client explains the mixture"
        shares.append(best[1])
        partners.append(best[2])
    assert max(shares) - min(shares) < 1e-4, "one λ a batch"
    return Taken(shares[0], partners)


def watched_loss(here: World, local: Local[Labelled, Any], batch: Batch) -> tuple[Loss, list[torch.Tensor]]:
    seen: list[torch.Tensor] = []
    hook = here.net.network.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].clone()))
    here.net.network.train()
    loss = here.method.loss(here.net, batch, local.const)
    hook.remove()
    return loss, seen


@pytest.mark.parametrize("mix_weight", [1.0, 0.3])
def test_fix_and_mix(mix_weight: float) -> None:
    here, everything = unaugmented(mix_weight=mix_weight)
    local = here.prepare()
    for batch in batches(local.data, Budget(1, None, 8), (0, 1, CLIENT)):
        loss, (strong, mixed) = watched_loss(here, local, batch)
        at = [int(local.const.fixed[position]) for position in batch.unlabelled.position]
        assert torch.equal(strong, everything[at])
        taken = taken_apart(mixed, strong, everything, at)
        label = local.const.label[at].tolist()
        other = local.const.label[taken.partners].tolist()
        with torch.no_grad():
            on_strong, on_mixed = (here.net(view).logits.double().numpy() for view in (strong, mixed))
        fix = mean_over_all(cross_entropies(on_strong, label), [True] * len(label))
        own, foreign = (mean_over_all(cross_entropies(on_mixed, goal), [True] * len(at)) for goal in (label, other))
        mix = taken.share * own + (1 - taken.share) * foreign
        assert loss.terms["consistency"].item() == pytest.approx(fix, rel=1e-4)
        assert loss.terms["mix"].item() == pytest.approx(mix, rel=1e-3)
        assert loss.value.item() == pytest.approx(fix + mix_weight * mix, rel=1e-3)
        assert loss.value.requires_grad


def test_partners_are_drawn_from_all_images_alike_and_shares_from_beta() -> None:
    here, everything = unaugmented()
    local = here.prepare()
    shares, partners = [], []
    for batch in batches(local.data, Budget(None, 120, 8), (0, 1, CLIENT)):
        _, (strong, mixed) = watched_loss(here, local, batch)
        at = [int(local.const.fixed[position]) for position in batch.unlabelled.position]
        taken = taken_apart(mixed, strong, everything, at)
        shares.append(taken.share)
        partners += taken.partners
    counts = np.bincount(partners, minlength=len(everything))
    assert len(local.const.fixed) < len(everything)
    assert counts.min() > 0, "unconfident images are mixed in too"
    assert scipy.stats.chisquare(counts).pvalue > 1e-3
    assert scipy.stats.kstest(shares, scipy.stats.beta(0.75, 0.75).cdf).pvalue > 1e-3
    assert min(shares) < 0.5 < max(shares), "not folded to the larger half"


def test_the_mixture_depends_on_the_step_alone() -> None:
    here = world(threshold=0.0)
    local = here.prepare()
    first, second = (
        [watched_loss(here, local, batch)[1][1] for batch in batches(local.data, Budget(2, None, 8), (0, 1, CLIENT))]
        for _ in range(2)
    )
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert not torch.equal(first[0], first[1])
    elsewhere = next(iter(batches(local.data, Budget(2, None, 8), (0, 2, CLIENT))))
    assert not torch.equal(watched_loss(here, local, elsewhere)[1][1], first[0])


@pytest.mark.parametrize("concentration", [0.2, 0.75, 3.0])
def test_beta_draws(concentration: float) -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index, union-attr]
    drawn = [beta(concentration, torch_stream(step, "mix")) for step in range(3000)]
    assert scipy.stats.kstest(drawn, scipy.stats.beta(concentration, concentration).cdf).pvalue > 1e-3
    assert drawn[:5] == [beta(concentration, torch_stream(step, "mix")) for step in range(5)]
    stream = torch_stream(0, "mix")
    assert beta(concentration, stream) != beta(concentration, stream)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])  # type: ignore[index]


@given(
    st.lists(st.lists(st.floats(-20, 20, width=32), min_size=3, max_size=3), min_size=1, max_size=6), st.floats(0, 1)
)
def test_mixed_cross_entropy_is_that_of_the_mixed_target(rows: list[list[float]], share: float) -> None:
    label = [index % 3 for index in range(len(rows))]
    other = [(2 * index + 1) % 3 for index in range(len(rows))]
    found = mixed_cross_entropy(
        torch.tensor(rows, dtype=torch.float64), torch.tensor(label), torch.tensor(other), share
    )
    for row, one, two, value in zip(rows, label, other, found.tolist(), strict=True):
        target = [share * (index == one) + (1 - share) * (index == two) for index in range(3)]
        expected = -sum(part * log_p for part, log_p in zip(target, log_probabilities(row), strict=True))
        assert value == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_without_mixing_and_threshold_a_client_is_one_of_fedfixmatch() -> None:
    here = world(threshold=0.0, mix_weight=0.0, gate_view="plain")
    other = toy_parts(toy_recipe("fedfixmatch", "server", {"method": {"threshold": 0.0}}, rounds=2))
    theirs = client_round(place_of(other), Task(1, CLIENT, 0.05, None), here.down, here.data)
    assert equal_weights(reply_of(here).up.weights, theirs.up.weights)


# Clients with nothing to learn from


def test_a_client_without_a_confident_image_takes_no_step() -> None:
    here = world(threshold=1.0)
    reply = reply_of(here)
    assert float(reply.up.samples) == 0.0
    assert (reply.record.steps, reply.record.images, reply.record.terms) == (0, 0, {})
    assert all(torch.equal(tensor, here.down.weights[name]) for name, tensor in reply.up.weights.items())
    assert reply.record.pseudo is not None
    assert len(reply.record.pseudo.position) == len(here.data.unlabelled)
    assert not reply.record.pseudo.used.any()


def test_it_learns_from_its_labels_if_it_has_any() -> None:
    here = world("clients", threshold=1.0)
    reply = reply_of(here)
    assert float(reply.up.samples) == len(here.data.labelled)
    assert reply.record.terms.keys() == {"total", "supervised"}
    everyone = reply_of(world("clients", threshold=0.0))
    assert everyone.record.terms.keys() == {"total", "supervised", "consistency", "mix"}
    terms = everyone.record.terms
    parts = terms["supervised"] + terms["consistency"] + terms["mix"]
    assert terms["total"] == pytest.approx(parts, rel=1e-5)


def test_one_sure_image_does_not_end_training_on_labels() -> None:
    """Epochs were counted over sure images as soon as there was one."""
    here = world("clients", gate_view="plain")
    first, second = sorted(
        (sure for _, sure in confidences(here, here.data.views.plain(here.data.images[here.data.unlabelled]))),
        reverse=True,
    )[:2]
    found = {}
    for threshold in (0.0, (first + second) / 2):
        reply = reply_of(world("clients", {"local": {"epochs": 2}}, threshold=threshold, gate_view="plain"))
        assert reply.record.pseudo is not None
        found[int(reply.record.pseudo.used.sum())] = reply.record.steps
    assert found == dict.fromkeys((1, len(here.data.unlabelled)), 2 * (len(here.data.unlabelled) // 8))


def test_a_run_in_which_nobody_is_ever_sure_is_the_servers_alone(tmp_path: Path) -> None:
    silent = run_toy(world(threshold=1.0).parts, tmp_path / "silent")
    alone = run_toy(toy_parts(toy_recipe("server-only", "server", rounds=2)), tmp_path / "alone")
    assert equal_weights(silent.weights, alone.weights)


# The server


def shifted(weights: dict[str, torch.Tensor], by: float) -> dict[str, torch.Tensor]:
    return {name: tensor + by for name, tensor in weights.items()}


def test_momentum_over_three_rounds_by_hand() -> None:
    here = world("clients")  # no labels at the server: nothing is fine-tuned
    site = site_of(here.parts)
    sent = site.net.trained_names()
    parameters = set(site.net.named_parameters())
    server = Moving(here.down.weights, {})
    w = {name: tensor.double().numpy() for name, tensor in here.down.weights.items()}
    v = {name: np.zeros_like(tensor) for name, tensor in w.items()}
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        models = [{n: torch.rand(server.weights[n].shape, generator=generator) for n in sent} for _ in range(3)]
        # the third had nothing to learn from; the others count alike, however many images they hold
        ups = [Up(model, torch.tensor(count)) for model, count in zip(models, (5.0, 90.0, 0.0), strict=True)]
        server = here.method.aggregate(server, ups, site)
        assert site.notes["client_weights"] == [0.5, 0.5, 0.0]
        for name in sent:
            middle = (models[0][name].double().numpy() + models[1][name].double().numpy()) / 2
            if name in parameters:
                v[name] = 0.5 * v[name] + (w[name] - middle)
                w[name] = w[name] - v[name]
            else:
                w[name] = middle
    assert any(name not in parameters for name in sent), "tracked statistics are sent"
    assert server.velocity.keys() == parameters
    for name in w:
        np.testing.assert_allclose(server.weights[name].numpy(), w[name], rtol=1e-4, atol=1e-5, err_msg=name)
    assert all(bool((t >= 0).all()) for name, t in server.weights.items() if name.endswith("running_var"))


def test_without_momentum_the_server_takes_the_mean() -> None:
    here = world("clients", server_momentum=0.0)
    site = site_of(here.parts)
    server = Moving(here.down.weights, shifted(here.down.weights, 3.0))
    ups = [Up(shifted(here.down.weights, by), torch.tensor(1.0)) for by in (0.5, 1.5)]
    moved = here.method.aggregate(server, ups, site)
    for name, tensor in moved.weights.items():
        torch.testing.assert_close(tensor, here.down.weights[name] + 1)


@pytest.mark.parametrize("count", [0, 2])
def test_nobody_active_means_fine_tuning_only(count: int) -> None:
    here = world()
    server = Moving(here.down.weights, {name: torch.ones_like(t) for name, t in here.net.named_parameters().items()})
    ups = [Up({n: here.down.weights[n] for n in here.net.trained_names()}, torch.tensor(0.0))] * count
    after = here.method.aggregate(server, ups, site_of(here.parts))
    site = site_of(here.parts)
    assert equal_weights(after.weights, site.fine_tune(server.weights, here.method.server_loss))
    assert equal_weights(after.velocity, server.velocity), "momentum rests"
    kept = step_to_mean(server, ups, site, torch.full((count,), 0.5), 0.5)
    assert equal_weights(kept.weights, server.weights)


def test_the_server_fine_tunes_what_momentum_left() -> None:
    here = world()
    server = Moving(here.down.weights, {})
    up = Up({n: here.down.weights[n] + 0.01 for n in here.net.trained_names()}, torch.tensor(4.0))
    after = here.method.aggregate(server, [up], site_of(here.parts))
    start = here.down.weights | up.weights
    expected = site_of(here.parts).fine_tune(start, here.method.server_loss)
    for name, tensor in after.weights.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-4)


# The command


@pytest.mark.slow
@pytest.mark.parametrize("labels", ["server", "clients"])
def test_quickstart(labels: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    overrides = ("method=semifl", f"scenario.labels={labels}", "rounds=3", "local.epochs=1", "engine.workers=1")
    threshold = {"server": 0.7, "clients": 0.18}[labels]  # three rounds make nobody 0.95 sure
    smaller = ("server.warmup_epochs=20", "clients_per_round=4", "evaluate.every=3", f"method.threshold={threshold}")
    outcome = semifed(capsys, "run", "quickstart", *overrides, *smaller, "--out", str(out), "--quiet")
    assert outcome.code == 0, outcome.err
    rounds = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    assert [line["round"] for line in rounds] == [0, 1, 2, 3]
    assert sum(line["pseudo"]["used"] for line in rounds[1:]) > 0
    assert {"consistency", "mix"} <= rounds[-1]["loss"].keys()
    assert ("supervised" in rounds[-1]["loss"]) == (labels == "clients")
    assert rounds[-1]["metrics"]["accuracy"] > (0.4 if labels == "server" else 0.1)  # chance is 1/6

"""The rejection threshold: its parts against counting by hand, and the share of new images it really accepts."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from semifed.assembly import build_net, optimiser, prepare_run
from semifed.evaluate import Evaluator
from semifed.fit import Diverged
from semifed.method import Method
from semifed.methods.server_only import ServerOnly
from semifed.net import Net
from semifed.payloads import Prediction, Server
from semifed.recipe import Recipe
from semifed.recipe_file import load_recipe
from semifed.run import execute
from semifed.server import ServerSite
from semifed.threshold import ROUGH, VIEWS, assigned_folds, held_out, ranks, rejection_threshold, scores_of_views
from semifed.wire import Weights
from toys import Quiet, equal_weights, run_toy, toy_parts, toy_recipe

score_lists = st.lists(st.integers(-5, 5).map(float), min_size=1, max_size=30)

FOLDS = 5


@dataclass(frozen=True, kw_only=True)
class Brightness(Method):
    """Learns nothing; the brighter an image, the less it is known."""

    def setup(self, weights: Weights, site: ServerSite) -> Server:
        return Server(weights)

    def predict(self, net: Net, images: Tensor) -> Prediction:
        return Prediction(torch.zeros(len(images), 3), images.mean(dim=(1, 2, 3)))


def site_of(recipe: Recipe) -> tuple[ServerSite, Weights]:
    parts = toy_parts(recipe) if recipe.dataset == "toy" else prepare_run(recipe)
    shape = parts.scenario.dataset.x_train.shape[1:]
    net = build_net(recipe, parts.method, shape, len(parts.scenario.known))
    server = recipe.server
    site = ServerSite(
        net,
        parts.scenario.server,
        optimiser(recipe),
        batch=server.batch,
        warmup_epochs=server.warmup_epochs,
        finetune_epochs=0,
        rounds=recipe.rounds,
        seed=recipe.seed,
    )
    return site, net.state()


def plain_site(labelled_per_class: int) -> tuple[ServerSite, Weights]:
    """All views are the images themselves."""
    views = {"weak": "none", "strong": "none"}
    changes = {"views": views, "scenario": {"labelled_per_class": labelled_per_class}}
    return site_of(toy_recipe("server-only", "server", changes))


def brightness(site: ServerSite) -> np.ndarray:
    assert site.labelled is not None
    return site.plain_images().mean(dim=(1, 2, 3)).double().numpy()


@given(score_lists, score_lists)
def test_a_rank_is_the_share_that_lies_below(new: list[float], learnt: list[float]) -> None:
    expected = [sum(other < one for other in learnt) / len(learnt) for one in new]
    assert ranks(np.array(new), np.array(learnt)).tolist() == pytest.approx(expected)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(2, 7), st.integers(0, 5))
def test_folds_are_alike_in_size_and_classes(labels: list[int], count: int, seed: int) -> None:
    given_labels = torch.tensor(labels)
    fold = assigned_folds(given_labels, count, torch.Generator().manual_seed(seed))
    for some in (torch.ones(len(labels), dtype=torch.bool), *(given_labels == label for label in range(4))):
        sizes = torch.bincount(fold[some], minlength=count)
        assert sizes.max() - sizes.min() <= 1


def test_no_fold_model_has_learnt_what_it_is_asked_about() -> None:
    site, initial = plain_site(labelled_per_class=7)
    assert site.labelled is not None
    learnt: list[set[int]] = []

    class Watched(Brightness):
        def setup(self, weights: Weights, site: ServerSite) -> Server:
            assert site.labelled is not None
            assert len(site.labelled.labels) == len(site.labelled.labelled)
            assert equal_weights(weights, initial)
            learnt.append(set(site.labelled.labelled.tolist()))
            return Server(weights)

    found = list(held_out(Watched(), site, initial, FOLDS))
    everything = set(site.labelled.labelled.tolist())
    out = [everything - rest for rest in learnt]
    assert len(out) == FOLDS
    assert sum(map(len, out)) == len(everything) == 21
    assert set().union(*out) == everything
    of = dict(zip(site.labelled.labelled.tolist(), brightness(site).tolist(), strict=True))
    for (new, views), held, rest in zip(found, out, learnt, strict=True):
        assert sorted(new) == pytest.approx(sorted(of[position] for position in held))
        assert sorted(views) == pytest.approx(sorted(of[position] for position in rest for _ in range(3 * VIEWS)))
    assert len(site.labelled.labelled) == 21  # the server itself is as before
    assert site.notes == {}


@pytest.mark.parametrize("accept", [0.5, 0.8, 0.95])
def test_where_nothing_is_learnt_the_images_themselves_decide(accept: float) -> None:
    site, initial = plain_site(labelled_per_class=18)
    own = brightness(site)
    rough = rejection_threshold(Brightness(), site, initial, initial, accept, 0)
    assert rough.value == pytest.approx(np.quantile(np.repeat(own, 3 * VIEWS), accept))
    assert rough.calibrated_on == ROUGH
    held = rejection_threshold(Brightness(), site, initial, initial, accept, FOLDS)
    assert held.value is not None
    assert (own <= held.value).mean() == pytest.approx(accept, abs=3 / len(own))
    assert held.calibrated_on == "the server's 54 labelled images, each held out once in 5 folds"


def test_views_come_in_equal_numbers() -> None:
    site, _ = site_of(toy_recipe("server-only", "server"))
    found = scores_of_views(Brightness(), site)
    assert len(found) == 12 * 3 * VIEWS
    assert found[: 12 * VIEWS].tolist() == pytest.approx(np.repeat(brightness(site), VIEWS).tolist())
    assert np.array_equal(found, scores_of_views(Brightness(), site))
    assert len(set(found[12 * VIEWS :])) > 100


def test_too_few_images_or_a_diverging_fold_leave_a_rough_guide() -> None:
    site, initial = plain_site(labelled_per_class=1)
    assert rejection_threshold(Brightness(), site, initial, initial, 0.9, FOLDS).calibrated_on == ROUGH

    class Breaks(Brightness):
        def setup(self, weights: Weights, site: ServerSite) -> Server:
            raise Diverged("the loss became nan in step 1")

    site, initial = plain_site(labelled_per_class=4)
    broken = rejection_threshold(Breaks(), site, initial, initial, 0.9, FOLDS)
    assert broken == rejection_threshold(Brightness(), site, initial, initial, 0.9, 0)


def test_no_threshold_without_labels_at_the_server() -> None:
    site, initial = site_of(toy_recipe("fixmatch-lpl", "clients"))
    found = rejection_threshold(Brightness(), site, initial, initial, 0.9, FOLDS)
    assert found == (None, "nothing: the server holds no labels")


@pytest.mark.parametrize("labels", ["clients", "server"])
def test_images_held_back_decide_at_once(labels: str) -> None:
    changes = {"views": {"weak": "none", "strong": "none"}, "scenario": {"validation_fraction": 0.3}}
    recipe = toy_recipe("fixmatch-lpl", labels, changes)
    site, initial = site_of(recipe)
    held = toy_parts(recipe).scenario.validation
    assert held is not None
    found = rejection_threshold(Brightness(), site, initial, initial, 0.9, FOLDS, held)
    bright = sorted(held.views.plain(held.images[held.labelled]).mean(dim=(1, 2, 3)).double().tolist())
    assert found.value == pytest.approx(np.quantile(bright, 0.9))
    assert found.calibrated_on == f"{len(bright)} labelled images that nobody trained on"


def test_clients_with_labels_can_reject_too(tmp_path: Path) -> None:
    """A run says so where it cannot, and with images held back the model calls some unknown."""
    for fraction, rejects in ((0.0, False), (0.3, True)):
        recipe = toy_recipe("fixmatch-lpl", "clients", {"scenario": {"validation_fraction": fraction}}, rounds=1)
        told = Quiet()
        execute(toy_parts(recipe), tmp_path / str(fraction), told)
        assert any("will call nothing unknown" in text for text in told.warnings) != rejects
        model = json.loads((tmp_path / str(fraction) / "model" / "model.json").read_text())
        assert (model["threshold"] is not None) == rejects


def test_new_digits_are_accepted_as_often_as_asked() -> None:
    recipe = load_recipe("quickstart", ["method=server-only", "server.warmup_epochs=30"])
    parts = prepare_run(recipe)
    site, initial = site_of(recipe)
    method = ServerOnly()
    delivered = method.setup(initial, site).weights
    evaluation = Evaluator(parts.scenario, (), 0, None).test(method, site.net, delivered)
    found = rejection_threshold(method, site, initial, delivered, 0.9, FOLDS)
    assert evaluation.at_threshold(found.value)["accepted_known"] == pytest.approx(0.9, abs=0.06)
    site.net.load(delivered)
    learnt = method.predict(site.net, site.plain_images()).unknown
    naive = float(np.quantile(learnt.detach().double().numpy(), 0.9))
    assert evaluation.at_threshold(naive)["accepted_known"] < 0.8  # the reason for all this


def test_a_resumed_run_ends_with_the_same_threshold(tmp_path: Path) -> None:
    parts = toy_parts(toy_recipe("openfl", "server", rounds=2))
    run_toy(parts, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run_toy(parts, tmp_path / "cut", reporter=Quiet(stop_after=2))
    run_toy(parts, tmp_path / "cut", resume=True)
    whole, cut = (json.loads((tmp_path / name / "model/model.json").read_text()) for name in ("whole", "cut"))
    assert whole == cut
    assert isinstance(whole["threshold"], float)

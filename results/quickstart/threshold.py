"""How many new images a rejection threshold really accepts, by what it was calibrated on.

    python results/quickstart/threshold.py RUNS...

reads finished runs with labels at the server and prints a Markdown table: for each way to calibrate and each method,
the share of known test images accepted where 80, 90 and 95 % were asked for, and how far off that is on average.
"""

import argparse
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file

from semifed.assembly import assemble, optimiser, prepare_run
from semifed.data.scenario import UNKNOWN
from semifed.recipe_file import load_recipe
from semifed.server import ServerSite
from semifed.threshold import VIEWS, Scores, held_out, ranks, scores, scores_of_views

ASKED = (0.8, 0.9, 0.95)
PLAIN, WEAK, STRONG, MIXED = "plain", "weak views", "strong views", "plain, weak and strong views"
FOLD_SCORES, FOLD_RANKS = "5 folds, scores", "5 folds, ranks (ours)"
TRUTH = "the test images themselves"


class Shares(NamedTuple):
    """What one threshold does to the test images of one run."""

    asked: float
    accepted_known: float
    rejected_unknown: float


def main() -> None:
    """Measure every run, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    torch.set_num_threads(1)
    found: dict[str, dict[str, list[Shares]]] = defaultdict(lambda: defaultdict(list))
    for root in parser.parse_args().runs:
        for summary in sorted(root.rglob("summary.json")):
            method, measured = measure(summary.parent)
            for way, shares in measured.items():
                found[way][method].extend(shares)
    print_table(found)


def measure(run: Path) -> tuple[str, dict[str, list[Shares]]]:
    """The name of a run's method, and what thresholds of each kind do to its test images."""
    recipe = load_recipe(str(run / "recipe.toml"), ["evaluate.unseen=[]"])
    parts = prepare_run(recipe)
    method, scenario, server = parts.method, parts.scenario, recipe.server
    net, _ = assemble(parts)
    initial, delivered = net.state(), load_file(run / "model" / "model.safetensors")
    site = ServerSite(
        net,
        scenario.server,
        optimiser(recipe)._replace(lr=server.lr or recipe.local.lr),
        batch=server.batch,
        warmup_epochs=server.warmup_epochs,
        finetune_epochs=server.finetune_epochs,
        rounds=recipe.rounds,
        seed=recipe.seed,
    )
    folds = list(held_out(method, site, initial, 5))
    held_out_ranks = np.concatenate([ranks(new, learnt) for new, learnt in folds])
    net.load(delivered)
    views = scores_of_views(method, site)
    part = len(views) // 3
    calibration = {
        PLAIN: views[:part:VIEWS],
        WEAK: views[part : 2 * part],
        STRONG: views[2 * part :],
        MIXED: views,
        FOLD_SCORES: np.concatenate([new for new, _ in folds]),
    }
    is_known = scenario.test_labels != UNKNOWN
    test = scenario.views.plain(scenario.dataset.x_test)
    known, unknown = scores(method, net, test[is_known]), scores(method, net, test[~is_known])
    calibration[TRUTH] = known

    def shares(asked: float, threshold: float) -> Shares:
        return Shares(asked, float((known <= threshold).mean()), float((unknown > threshold).mean()))

    measured = {
        way: [shares(asked, float(np.quantile(own, asked))) for asked in ASKED] for way, own in calibration.items()
    }
    measured[FOLD_RANKS] = [shares(asked, threshold_at(views, held_out_ranks, asked)) for asked in ASKED]
    return str(recipe.method["name"]), measured


def threshold_at(views: Scores, held_out_ranks: Scores, asked: float) -> float:
    """The shipped rule."""
    return float(np.quantile(views, np.quantile(held_out_ranks, asked)))


def print_table(found: Mapping[str, Mapping[str, list[Shares]]]) -> None:
    """Means over seeds in percent: known images accepted / unknown images rejected."""
    methods = sorted(found[PLAIN])
    print(f"| calibrated on | {' | '.join(methods)} | mean error |")
    print("|---" * (len(methods) + 2) + "|")
    for way in (PLAIN, WEAK, STRONG, MIXED, FOLD_SCORES, FOLD_RANKS, TRUTH):
        cells = []
        for method in methods:
            at = [[one for one in found[way][method] if one.asked == asked] for asked in ASKED]
            accepted = ", ".join(f"{100 * np.mean([one.accepted_known for one in some]):.0f}" for some in at)
            rejected = ", ".join(f"{100 * np.mean([one.rejected_unknown for one in some]):.0f}" for some in at)
            cells.append(f"{accepted} / {rejected}")
        errors = [abs(one.accepted_known - one.asked) for shares in found[way].values() for one in shares]
        print(f"| {way} | {' | '.join(cells)} | {100 * np.mean(errors):.1f} |")


if __name__ == "__main__":
    main()

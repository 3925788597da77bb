"""Diagnostics of two models' labels: against loops over images, from the step that makes them to the report."""

import json
import math
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from semifed.client_round import ClientRecord, Task, client_round
from semifed.data.client import Batch
from semifed.engines.packing import pack_record, unpack_record
from semifed.fit import Loss
from semifed.losses import entropy
from semifed.methods.sage import SAGE
from semifed.net import Net
from semifed.opinions import (
    RANKS,
    Labelled,
    compare_opinions,
    label_entropy,
    majority_classes,
    rank_of,
)
from semifed.payloads import Down, Teacher
from semifed.pseudo import PseudoLabels
from semifed.report import write_report
from semifed.targets import KAPPA, confidence_gap, gap_mixing, opinion, sage_targets
from semifed.wire import to_arrays
from toys import Outcome, equal_weights, place_of, run_toy, shaken, toy_parts, toy_recipe

CLASSES = 5
seeds = st.integers(0, 10**6)


def drawn(seed: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(count, CLASSES, generator=generator, dtype=torch.float64)).softmax(dim=1)


def client_of(seed: int, count: int, *, local: bool = True, received: bool = True, labels: int = 7) -> Labelled:
    """A client with the given number of unlabelled and labelled images, and opinions on the former."""
    ours, theirs = opinion(drawn(seed, count), 0.5), opinion(drawn(seed + 1, count), 0.4)
    chosen = sage_targets(ours, theirs)
    generator = torch.Generator().manual_seed(seed + 2)
    truth = torch.randint(-1, CLASSES, (count,), generator=generator)
    own = torch.randint(0, CLASSES, (labels,), generator=generator)
    pseudo = PseudoLabels(
        torch.arange(count),
        chosen.label,
        chosen.used,
        ours if local else None,
        theirs if received else None,
        chosen.mixing if local and received else None,
    )
    return Labelled(pseudo, truth, majority_classes(own, CLASSES))


def mean(values: list[float]) -> Any:
    return pytest.approx(sum(values) / len(values)) if values else None


def side_by_loop(clients: list[Labelled], side: str) -> dict[str, Any]:
    sure, right, confidence, entropy, spread = [], [], [], [], 0.0
    for one in clients:
        said = getattr(one.pseudo, side)
        named = [0] * CLASSES
        for row, trusted, true in zip(said.probabilities.tolist(), said.sure.tolist(), one.truth.tolist(), strict=True):
            sure.append(float(trusted))
            confidence.append(max(row))
            entropy.append(-sum(p * math.log(p) for p in row if p > 0))
            if trusted:
                right.append(float(row.index(max(row)) == true))
                named[row.index(max(row))] += 1
        total = sum(named)
        spread -= sum(total * (n / total) * math.log(n / total) for n in named if n)
    count = int(sum(sure))
    return {
        "sure": count,
        "share": mean(sure),
        "accuracy": mean(right),
        "confidence": mean(confidence),
        "entropy": mean(entropy),
        "class_entropy": pytest.approx(spread / count, abs=1e-9) if count else None,
    }


def agreement_by_loop(clients: list[Labelled]) -> dict[str, Any]:
    gaps: dict[str, list[float]] = {"mean": [], "majority": [], "minority": []}
    shares: dict[str, list[float]] = {"mean": [], "majority": [], "minority": []}
    same, ranks = [], {"local": [], "received": []}  # type: ignore[var-annotated]
    groups = ("both_sure", "only_local_sure", "only_received_sure", "none")
    right: dict[str, list[tuple[bool, bool, bool]]] = {name: [] for name in groups}
    for one in clients:
        local, received = one.pseudo.local, one.pseudo.received
        assert local is not None
        assert received is not None
        for index in range(len(one.truth)):
            p_l, p_g = local.probabilities[index].tolist(), received.probabilities[index].tolist()
            mine, theirs = p_l.index(max(p_l)), p_g.index(max(p_g))
            same.append(float(mine == theirs))
            true, given_ = int(one.truth[index]), int(one.pseudo.label[index])
            group = groups[
                (0 if received.sure[index] else 1) if local.sure[index] else 2 if received.sure[index] else 3
            ]
            right[group].append((mine == true, theirs == true, given_ == true))
            if local.sure[index]:
                gap = abs(max(p_l) - max(p_g)) + 1e-6
                kinds = ["mean"]
                if one.majority is not None:
                    kinds.append("majority" if one.majority[mine] else "minority")
                for kind in kinds:
                    gaps[kind].append(gap)
                    shares[kind].append(max(math.exp(-KAPPA * gap), 1e-6))
                ranks["local"].append(sorted(p_g, reverse=True).index(p_g[mine]) + 1)
            if received.sure[index]:
                ranks["received"].append(sorted(p_l, reverse=True).index(p_l[theirs]) + 1)

    def histogram(own: list[int]) -> list[int]:
        return [*(own.count(place) for place in range(1, RANKS + 1)), sum(place > RANKS for place in own)]

    return {
        "gap": {kind: mean(own) for kind, own in gaps.items()},
        "mixing": {kind: mean(own) for kind, own in shares.items()},
        "agreement": {
            "same": mean(same),
            "local_rank": mean(ranks["local"]),
            "received_rank": mean(ranks["received"]),
            "local_ranks": histogram(ranks["local"]),
            "received_ranks": histogram(ranks["received"]),
        },
        **{
            name: {
                "share": mean([float(name == other) for other, own in right.items() for _ in own]),
                "local": mean([float(one[0]) for one in right[name]]),
                "received": mean([float(one[1]) for one in right[name]]),
                "given": mean([float(one[2]) for one in right[name]]),
            }
            for name in groups[:3]
        },
    }


@given(seeds, st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=3))
def test_every_number_is_that_of_a_loop(seed: int, sizes: list[tuple[int, int]]) -> None:
    clients = [client_of(seed + 5 * index, n, labels=k) for index, (n, k) in enumerate(sizes)]
    found = compare_opinions(clients)
    assert found.keys() == {"local", "received", *agreement_by_loop(clients)}
    assert found["local"] == side_by_loop(clients, "local")
    assert found["received"] == side_by_loop(clients, "received")
    for name, expected in agreement_by_loop(clients).items():
        assert found[name] == expected


def test_a_label_far_down_the_other_ranking_is_counted_as_later() -> None:
    rows = torch.eye(8, dtype=torch.float64) * 0.5 + torch.arange(8).double() * 0.001
    local = opinion(rows[:1], 0.1)
    received = opinion(torch.arange(8, dtype=torch.float64)[None] / 28, 0.0)
    pseudo = PseudoLabels(torch.arange(1), local.label, local.sure, local, received)
    found = compare_opinions([Labelled(pseudo, torch.tensor([0]), None)])
    assert found["agreement"]["local_ranks"] == [0, 0, 0, 0, 0, 1]
    assert found["agreement"]["local_rank"] == 8
    assert found["mixing"] == {"mean": None, "majority": None, "minority": None}, "this method mixes nothing"
    assert found["gap"]["majority"] is found["gap"]["minority"] is None, "this client has no labels"


@pytest.mark.parametrize(("local", "received"), [(True, False), (False, True), (False, False)])
def test_one_opinion_shows_alone_and_none_shows_nothing(local: bool, received: bool) -> None:
    found = compare_opinions([client_of(3, 6, local=local, received=received)])
    assert list(found) == [side for side, asked in (("local", local), ("received", received)) if asked]


def test_clients_without_an_opinion_do_not_count() -> None:
    one, silent = client_of(3, 6), client_of(9, 4, local=False, received=False)
    assert compare_opinions([one, silent]) == compare_opinions([one])
    assert compare_opinions([]) == {}


@given(seeds, st.integers(1, 6))
def test_ranks_are_scipys(seed: int, count: int) -> None:
    p = drawn(seed, count).numpy().round(1)  # rounding makes ties
    label = np.random.default_rng(seed).integers(0, CLASSES, count)
    expected = [scipy.stats.rankdata(-row, method="min")[own] for row, own in zip(p, label, strict=True)]
    assert rank_of(torch.from_numpy(label), torch.from_numpy(p)).tolist() == expected


@given(seeds, st.integers(1, 6))
def test_entropies_are_scipys(seed: int, count: int) -> None:
    p = drawn(seed, count)
    assert entropy(p).numpy() == pytest.approx(scipy.stats.entropy(p.numpy(), axis=1))
    label = p.argmax(dim=1)
    share = np.bincount(label.numpy()) / count
    assert label_entropy(label, CLASSES) == pytest.approx(scipy.stats.entropy(share), abs=1e-12)


def test_limits_of_the_entropies() -> None:
    certain = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    assert entropy(certain).tolist() == pytest.approx([0.0, math.log(2)])
    assert label_entropy(torch.tensor([2, 2]), 3) == 0
    assert label_entropy(torch.tensor([], dtype=torch.int64), 3) == 0


def test_majority_is_at_least_an_even_share() -> None:
    assert majority_classes(torch.tensor([0, 0, 0, 1, 1, 2]), 3).tolist() == [True, True, False]  # type: ignore[union-attr]
    assert majority_classes(torch.arange(4), 4).all()  # type: ignore[union-attr]
    assert majority_classes(torch.tensor([], dtype=torch.int64), 4) is None


# From the step to the record


def test_an_image_counts_with_the_last_opinions_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = toy_parts(toy_recipe("sage", "clients", {"local": {"epochs": 2}}))
    place, data = place_of(parts), parts.scenario.client(1)
    seen: list[PseudoLabels] = []
    plain = SAGE.loss

    def watching(self: SAGE, net: Net, batch: Batch, const: Teacher) -> Loss:
        loss = plain(self, net, batch, const)
        assert loss.pseudo is not None
        seen.append(loss.pseudo)
        return loss

    monkeypatch.setattr(SAGE, "loss", watching)
    reply = client_round(place, Task(1, 1, 0.05, None), Down(shaken(place.net.state())), data)
    found = reply.record.pseudo
    assert found is not None
    assert found.local is not None
    assert found.received is not None
    assert found.mixing is not None
    assert sum(len(part.position) for part in seen) > len(data.unlabelled), "images came twice"
    where = {int(image): index for index, image in enumerate(found.position)}
    last: dict[int, tuple[PseudoLabels, int]] = {}
    for part in seen:
        for index, position in enumerate(part.position.tolist()):
            last[int(data.unlabelled[position])] = (part, index)
    assert where.keys() == last.keys()
    for image, (part, index) in last.items():
        row = where[image]
        assert int(found.label[row]) == int(part.label[index])
        assert bool(found.used[row]) == bool(part.used[index])
        assert torch.equal(found.mixing[row], part.mixing[index])  # type: ignore[index]
        assert torch.equal(found.local.probabilities[row], part.local.probabilities[index])  # type: ignore[union-attr]
        assert torch.equal(found.received.sure[row], part.received.sure[index])  # type: ignore[union-attr]
    expected = gap_mixing(confidence_gap(found.local, found.received), KAPPA)
    torch.testing.assert_close(found.mixing, expected)


@pytest.mark.parametrize(
    ("method", "asked"),
    [
        ("fixmatch-lpl", ["local"]),
        ("fixmatch-gpl", ["received"]),
        ("fedprox-fixmatch", ["local"]),
        ("fedfixmatch", []),
        ("fedavg", []),
    ],
)
def test_a_method_shows_the_opinions_it_asks_for(method: str, asked: list[str], tmp_path: Path) -> None:
    outcome = run_toy(toy_parts(toy_recipe(method, "clients", rounds=1)), tmp_path / "run")
    assert list(outcome.rounds[1].get("opinions", {})) == asked
    if method == "fixmatch-lpl":
        pseudo, local = outcome.rounds[1]["pseudo"], outcome.rounds[1]["opinions"]["local"]
        assert (local["sure"], local["accuracy"]) == (pseudo["used"], pseudo["accuracy"])


def sage_run(tmp_path: Path, labels: str = "clients", workers: int = 1) -> Outcome:
    changes = {"engine": {"workers": workers}}
    return run_toy(toy_parts(toy_recipe("sage", labels, changes, rounds=2)), tmp_path / f"{labels}-{workers}")


def test_opinions_cross_the_boundary_of_a_process() -> None:
    pseudo = client_of(1, 6).pseudo
    for given_ in (pseudo, pseudo._replace(received=None, mixing=None), PseudoLabels(*pseudo[:3]), None):
        record = ClientRecord(3, 1, 1, {}, given_, 0.0)
        packed = pickle.loads(pickle.dumps(pack_record(record)))
        back = unpack_record(packed)
        assert back._replace(pseudo=None) == record._replace(pseudo=None)
        assert equal_weights(to_arrays(back.pseudo), to_arrays(given_))
        assert (back.pseudo is None) == (given_ is None)


@pytest.mark.slow
def test_opinions_are_the_same_through_worker_processes(tmp_path: Path) -> None:
    alone, many = sage_run(tmp_path), sage_run(tmp_path, workers=2)
    assert [line.get("opinions") for line in alone.rounds] == [line.get("opinions") for line in many.rounds]


def test_both_together_are_at_least_as_many_as_either_and_nothing_is_sent(tmp_path: Path) -> None:
    outcome = sage_run(tmp_path)
    record = outcome.rounds[2]["opinions"]
    assert record["local"]["sure"] + record["received"]["sure"] > 0
    assert outcome.rounds[2]["pseudo"]["used"] >= max(record["local"]["sure"], record["received"]["sure"])
    assert record["gap"]["majority"] is not None
    without = run_toy(toy_parts(toy_recipe("fedavg", "clients", rounds=2)), tmp_path / "plain")
    for key in ("bytes_up", "bytes_down"):
        assert [line[key] for line in outcome.rounds] == [line[key] for line in without.rounds]


# The report


def section(run: Path) -> str:
    html = write_report(run).read_text(encoding="utf-8")
    found = re.search(r'<section id="opinions">.*?</section>', html, flags=re.DOTALL)
    return found.group() if found else ""


def test_the_report_draws_both_opinions(tmp_path: Path) -> None:
    outcome = sage_run(tmp_path)
    used = outcome.rounds[-1]["pseudo"]
    used["used"] = 41  # the toy uses every image it sees, and would hide a mix-up of both
    lines = "".join(json.dumps(line) + "\n" for line in outcome.rounds)
    (tmp_path / "clients-1" / "rounds.jsonl").write_text(lines, encoding="utf-8")
    shown = section(tmp_path / "clients-1")
    titles = re.findall(r"<h3>(.*?)</h3>", shown)
    assert titles == [
        "Images with a sure label",
        "Sure labels that are right",
        "Images by who is sure of them",
        "Right labels by who is sure",
        "Gap of confidence, ΔC",
        "Say of the local model, λ",
        "Agreement",
        "Place of a label in the other model&#39;s ranking",
        "Entropy of predictions",
        "Entropy of labels",
    ]
    last = outcome.rounds[-1]["opinions"]
    assert f"local majority classes <b>{last['mixing']['majority']:.3g}</b>" in shown
    assert f"local model <b>{last['local']['sure']}</b>" in shown
    assert "both together, as used <b>41</b>" in shown
    assert f"both together, as used <b>{100 * used['accuracy']:.1f}</b>" in shown
    assert f"received model <b>{100 * last['received']['accuracy']:.1f}</b>" in shown
    assert f"all images: both name one class <b>{100 * last['agreement']['same']:.1f}</b>" in shown
    assert f"only the local model <b>{100 * last['only_local_sure']['share']:.1f}</b>" in shown
    assert f"both models <b>{100 * last['both_sure']['given']:.1f}</b>" in shown
    ranks = last["agreement"]["local_ranks"]
    assert f"among the received model&#39;s classes <b>{100 * ranks[0] / sum(ranks):.1f}</b>" in shown


def test_labels_at_the_server_have_no_local_majority(tmp_path: Path) -> None:
    sage_run(tmp_path, "server")
    shown = section(tmp_path / "server-1")
    assert "Gap of confidence" in shown
    assert "majority" not in shown


def test_a_single_opinion_is_drawn_once(tmp_path: Path) -> None:
    run_toy(toy_parts(toy_recipe("fixmatch-lpl", "clients", rounds=1)), tmp_path / "run")
    shown = section(tmp_path / "run")
    assert re.findall(r"<h3>(.*?)</h3>", shown) == ["Entropy of predictions", "Entropy of labels"]
    assert "eceived model" not in shown


def test_no_opinion_no_section(tmp_path: Path) -> None:
    run_toy(toy_parts(toy_recipe("fedavg", "clients", rounds=1)), tmp_path / "run")
    assert section(tmp_path / "run") == ""


def test_a_run_without_unknown_classes_does_not_count_them(tmp_path: Path) -> None:
    changes = {"scenario": {"classes": "known", "known_count": None}}
    run_toy(toy_parts(toy_recipe("fixmatch-lpl", "clients", changes, rounds=1)), tmp_path / "run")
    html = write_report(tmp_path / "run").read_text(encoding="utf-8")
    assert '<section id="pseudo-labels">' in html
    assert '<section id="gate">' not in html
    assert "unknown classes" not in html

"""What groups are worth, on images whose groups are beyond doubt, and by hand."""

import math
from itertools import permutations

import pytest
import torch
from torch import Tensor

from semifed.discovery.evaluation import confidence_histograms, described_groups, discovery_metrics, judged_groups
from semifed.discovery.gallery import Gallery
from semifed.discovery.guided import GraphSettings
from semifed.discovery.inference import graph_clusters, kmeans_clusters
from semifed.models.network import Output

KNOWN, CLASSES, EACH = 3, 5, 24


def said_of(classes: Tensor, spread: float, seed: int) -> Output:
    """Features around one direction a class, and a classifier that is sure of known classes only."""
    noise = torch.randn(len(classes), 8, generator=torch.Generator().manual_seed(seed))
    features = 4 * torch.eye(8)[classes] + spread * noise
    return Output(6 * torch.eye(CLASSES)[classes][:, :KNOWN], features, {})


def gallery_of(spread: float) -> tuple[Gallery, Tensor]:
    classes, labels = torch.arange(CLASSES).repeat(EACH), torch.arange(KNOWN).repeat(8)
    return Gallery(said_of(classes, spread, 0), said_of(labels, spread, 1), labels, seed=1), classes


def best_match(member: Tensor, classes: Tensor) -> float:
    """By trying every way to name the groups."""
    groups = member.unique().tolist()
    names = [*range(CLASSES), *[None] * max(0, len(groups) - CLASSES)]
    hits = (
        sum(match[groups.index(int(group))] == int(true) for group, true in zip(member, classes, strict=True))
        for match in permutations(names, len(groups))
    )
    return max(hits) / len(classes)


def test_groups_that_lie_apart_are_found_in_every_way() -> None:
    gallery, classes = gallery_of(spread=0.2)
    for member in (
        graph_clusters(gallery, GraphSettings(), with_labels=False),
        graph_clusters(gallery, GraphSettings(), with_labels=True),
        kmeans_clusters(gallery, CLASSES),
    ):
        assert all(len(member[classes == one].unique()) == 1 for one in range(CLASSES))
        assert len(member.unique()) == CLASSES
    metrics = discovery_metrics(torch.zeros(len(classes), dtype=torch.int64), gallery, classes)
    for prefix in ("infomap.", "plus.", "kmeans."):
        assert [metrics[prefix + name] for name in ("all", "old", "new", "clusters")] == [1.0, 1.0, 1.0, CLASSES]
    assert metrics["all"] == 1 / CLASSES, "the method's own groups are judged by themselves"
    assert metrics["clusters"] == 1


@pytest.mark.parametrize("seed", range(4))
def test_the_numbers_are_those_of_every_match_tried(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(0, CLASSES, (30,), generator=generator)
    guesses = torch.randint(0, 6, (30,), generator=generator)
    member = torch.where(torch.rand(30, generator=generator) < 0.6, classes, guesses)
    found = judged_groups(member, classes, KNOWN)
    assert found["all"] == pytest.approx(best_match(member, classes))
    assert found["clusters"] == len(member.unique())
    old = int((classes < KNOWN).sum())
    assert found["all"] * 30 == pytest.approx(found["old"] * old + found["new"] * (30 - old))


def test_without_labelled_images_there_is_no_plus() -> None:
    gallery, classes = gallery_of(spread=0.2)
    bare = gallery._replace(labelled=said_of(classes[:0], 0.2, 1), labels=classes[:0])
    metrics = discovery_metrics(classes, bare, classes)
    assert not any(name.startswith("plus.") for name in metrics)
    assert metrics["all"] == metrics["all_balanced"] == 1
    assert not math.isnan(metrics["kmeans.all"])


def test_confidences_are_counted_as_by_hand() -> None:
    gallery, classes = gallery_of(spread=0.2)
    drawn = torch.Generator().manual_seed(3)
    images, labelled, taught = (
        said._replace(logits=2 * torch.randn(len(said.logits), KNOWN, generator=drawn))
        for said in (gallery.images, gallery.labelled, said_of(torch.arange(KNOWN).repeat(5), 0.2, 2))
    )
    told = confidence_histograms(gallery._replace(images=images, labelled=labelled), classes, taught, 8)
    assert told["bins"] == pytest.approx([number / 8 for number in range(9)])
    kinds = {"taught": taught.logits, "labelled": labelled.logits}
    kinds |= {"known": images.logits[classes < KNOWN], "novel": images.logits[classes >= KNOWN]}
    for kind, logits in kinds.items():
        counts = [0] * 8
        for row in logits.tolist():
            sure = math.exp(max(row)) / sum(map(math.exp, row))
            counts[min(int(8 * sure), 7)] += 1
        assert told["counts"][kind] == counts
    assert told["counts"]["novel"] != told["counts"]["known"]


def test_groups_are_listed_by_size_with_the_images_nearest_their_middle() -> None:
    drawn = torch.Generator().manual_seed(5)
    member = torch.randint(-1, 3, (40,), generator=drawn)
    classes = torch.randint(0, 4, (40,), generator=drawn)
    features = torch.randn(40, 6, generator=drawn)
    listed = described_groups(member, classes, ["a", "b", "c", "d"], features, shown=3)
    assert [group["size"] for group in listed] == sorted((member == one).sum().item() for one in range(3))[::-1]
    seen: set[int] = set()
    for group in listed:
        number = int(member[group["images"][0]])
        inside = [place for place in range(40) if member[place] == number]
        assert group["counts"] == [sum(int(classes[place]) == one for place in inside) for one in range(4)]
        unit = {place: features[place] / features[place].norm() for place in inside}
        middle = sum(unit.values()) / len(unit)
        nearest = sorted(inside, key=lambda place: -float(unit[place] @ middle))
        assert group["images"] == nearest[:3]
        seen.add(number)
    assert seen == {0, 1, 2}, "images without a group are in none"

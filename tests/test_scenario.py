"""Who holds what: every placement, class regime and partition, counted independently."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from semifed.data.datasets import Dataset
from semifed.data.partition import KINDS
from semifed.data.scenario import UNKNOWN, Scenario, build_scenario, class_counts
from semifed.data.views import Views
from semifed.errors import UserError
from toys import toy_dataset

VIEWS = Views.parse("none", "none", mean=(0.5,), std=(0.25,))
REGIMES = ("known", "open", "novel")


def settings_of(**changes: Any) -> Any:
    values: dict[str, Any] = {
        "labels": "clients",
        "classes": "known",
        "clients": 4,
        "partition": "iid",
        "alpha": None,
        "labelled_per_class": None,
        "labelled_fraction": None,
        "labelled_clients": None,
        "known": None,
        "known_count": None,
        "subset": None,
        "validation_fraction": 0.0,
    }
    return SimpleNamespace(**{**values, **changes})


def shuffled_dataset(per_class: int, classes: int, seed: int) -> Dataset:
    """Classes in random order, and not equally many of each."""
    dataset = toy_dataset(per_class=per_class, classes=classes, size=2)
    order = torch.randperm(len(dataset.y_train), generator=torch.Generator().manual_seed(seed))
    order = order[: len(order) - seed % 3]
    return dataset._replace(x_train=dataset.x_train[order], y_train=dataset.y_train[order])


PLACEMENT_KEYS: list[dict[str, Any]] = [
    {"labels": "server", "labelled_per_class": 2},
    {"labels": "clients", "labelled_per_class": 3},
    {"labels": "clients", "labelled_fraction": 0.3},
    {"labels": "some-clients", "labelled_clients": 2},
]


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Dataset, Any, int]:
    classes = draw(st.integers(2, 5))
    dataset = shuffled_dataset(draw(st.integers(5, 12)), classes, draw(st.integers(0, 20)))
    regime = draw(st.sampled_from(REGIMES))
    most = classes if regime == "known" else classes - 1
    known = draw(st.lists(st.integers(0, classes - 1), min_size=1, max_size=most, unique=True))
    by_count = draw(st.booleans())
    kind = draw(st.sampled_from(KINDS))
    chosen = settings_of(
        classes=regime,
        clients=draw(st.integers(2, 6)),
        partition=kind,
        alpha={"iid": None, "shards": 2}.get(kind, draw(st.sampled_from([0.1, 1.0]))),
        known=None if by_count else tuple(known),
        known_count=len(known) if by_count else None,
        subset=draw(st.none() | st.integers(classes * 4, classes * 8)),
        **draw(st.sampled_from(PLACEMENT_KEYS)),
    )
    return dataset, chosen, draw(st.integers(0, 50))


def held_once(scenario: Scenario) -> list[int]:
    """Every position a party holds, each party's own counted once."""
    parties = [np.union1d(held.labelled, held.unlabelled) for held in scenario.holdings]
    if scenario.server is not None:
        parties.append(scenario.server.labelled.numpy())
    return [int(position) for party in parties for position in party]


@settings(max_examples=150)
@given(worlds())
def test_any_scenario(world: tuple[Dataset, Any, int]) -> None:
    dataset, chosen, seed = world
    scenario = build_scenario(dataset, chosen, VIEWS, seed)
    raw = dataset.y_train.tolist()
    known = list(scenario.known)
    assert known == (sorted(chosen.known) if chosen.known is not None else list(range(chosen.known_count)))
    truth = [known.index(label) if label in known else UNKNOWN for label in raw]
    assert scenario.sealed.break_seal().tolist() == truth
    assert scenario.test_labels.tolist() == [
        known.index(label) if label in known else UNKNOWN for label in dataset.y_test.tolist()
    ]
    assert scenario.class_names() == [dataset.classes[label] for label in known]

    # No image is in two hands, and all images in play are in some hand.
    everything = held_once(scenario)
    assert len(set(everything)) == len(everything)
    in_play = [position for position in range(len(raw)) if chosen.classes != "known" or truth[position] != UNKNOWN]
    assert set(everything) <= set(in_play)
    assert len(everything) == min(chosen.subset or len(in_play), len(in_play))
    assert len(scenario.holdings) == chosen.clients

    labelled: set[int] = set()
    for index, held in enumerate(scenario.holdings):
        data = scenario.client(index)
        assert data.labels.tolist() == [truth[position] for position in held.labelled.tolist()]
        assert UNKNOWN not in data.labels.tolist()
        labelled |= set(held.labelled.tolist())
        merged = chosen.labels == "clients" and chosen.labelled_per_class is not None
        both = set(held.labelled.tolist()) & set(held.unlabelled.tolist())
        assert both == (set(held.labelled.tolist()) if merged else set())
        assert len(set(held.unlabelled.tolist())) == len(held.unlabelled)
        if chosen.labelled_fraction is not None:
            knowns = sum(truth[position] != UNKNOWN for position in np.union1d(held.labelled, held.unlabelled).tolist())
            assert len(held.labelled) == round(chosen.labelled_fraction * knowns)
    if chosen.labels == "server":
        assert labelled == set()
        assert scenario.server is not None
        labelled = set(scenario.server.labelled.tolist())
        assert scenario.server.labels.tolist() == [truth[position] for position in scenario.server.labelled.tolist()]
        assert len(scenario.server.unlabelled) == 0
    else:
        assert scenario.server is None
    if chosen.labelled_per_class is not None:
        counts = np.bincount([truth[position] for position in labelled], minlength=len(known))
        assert counts.tolist() == [chosen.labelled_per_class] * len(known)
    if chosen.labels == "some-clients":
        full = [held for held in scenario.holdings if len(held.labelled)]
        assert len(full) <= 2
        for held in full:
            assert all(truth[position] == UNKNOWN for position in held.unlabelled.tolist())

    visible = {position for position, label in enumerate(scenario.labels.tolist()) if label != UNKNOWN}
    assert visible == labelled


@settings(max_examples=60)
@given(worlds())
def test_the_ceiling_opens_exactly_the_known_images(world: tuple[Dataset, Any, int]) -> None:
    dataset, chosen, seed = world
    usual = build_scenario(dataset, chosen, VIEWS, seed)
    opened = build_scenario(dataset, chosen, VIEWS, seed, all_labels=True)
    truth = usual.sealed.break_seal().numpy()
    for index, (closed, open_) in enumerate(zip(usual.holdings, opened.holdings, strict=True)):
        everything = np.union1d(closed.labelled, closed.unlabelled)
        assert open_.labelled.tolist() == [position for position in everything if truth[position] != UNKNOWN]
        assert len(open_.unlabelled) == 0
        assert opened.client(index).labels.tolist() == truth[open_.labelled].tolist()


@settings(max_examples=60)
@given(worlds())
def test_the_seed_decides_and_the_counts_are_counted(world: tuple[Dataset, Any, int]) -> None:
    dataset, chosen, seed = world
    one, other = (build_scenario(dataset, chosen, VIEWS, seed) for _ in range(2))
    for left, right in zip(one.holdings, other.holdings, strict=True):
        assert left.labelled.tolist() == right.labelled.tolist()
        assert left.unlabelled.tolist() == right.unlabelled.tolist()
    counts: Any = class_counts(one)
    raw = dataset.y_train.tolist()
    assert counts["classes"] == list(dataset.classes)
    assert counts["known"] == [label in one.known for label in range(len(dataset.classes))]
    for index, held in enumerate(one.holdings):
        own = set(held.labelled.tolist())
        for key, positions in (("labelled", own), ("unlabelled", set(held.unlabelled.tolist()) - own)):
            expected = [sum(raw[position] == label for position in positions) for label in range(len(dataset.classes))]
            assert counts[key][index] == expected
    assert (counts["server"] is None) == (one.server is None)


def test_another_seed_is_another_scenario() -> None:
    dataset = toy_dataset(size=2)
    one, other = (build_scenario(dataset, settings_of(labelled_fraction=0.2), VIEWS, seed) for seed in (0, 1))
    assert one.holdings[0].unlabelled.tolist() != other.holdings[0].unlabelled.tolist()


@given(st.integers(3, 30), st.integers(0, 20))
def test_a_subset_is_stratified(subset: int, seed: int) -> None:
    dataset = shuffled_dataset(8, 3, seed)
    chosen = settings_of(labelled_fraction=0.5, subset=subset, clients=2)
    assume(subset <= len(dataset.y_train))
    scenario = build_scenario(dataset, chosen, VIEWS, seed)
    raw = dataset.y_train.numpy()
    taken = np.bincount(raw[held_once(scenario)], minlength=3)
    fair = np.bincount(raw, minlength=3) * subset / len(raw)
    assert np.abs(taken - fair).max() <= 1


def test_the_same_images_are_labelled_whatever_the_partition() -> None:
    dataset = toy_dataset(size=2)
    found = []
    for kind, alpha in (("iid", None), ("dirichlet", 0.1)):
        chosen = settings_of(labelled_per_class=3, partition=kind, alpha=alpha)
        scenario = build_scenario(dataset, chosen, VIEWS, 0)
        found.append(sorted(position for held in scenario.holdings for position in held.labelled.tolist()))
    assert found[0] == found[1]


def test_given_owners_are_kept() -> None:
    dataset = toy_dataset(size=2)
    assert "owner" in Dataset._fields, "scenario.partition=folders needs to know who owns an image"
    owned = dataset._replace(owner=torch.arange(len(dataset.y_train)) % 3)
    chosen = settings_of(partition="folders", clients=3, labelled_fraction=0.5)
    for index, held in enumerate(build_scenario(owned, chosen, VIEWS, 0).holdings):
        assert {position % 3 for position in (*held.labelled.tolist(), *held.unlabelled.tolist())} == {index}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"known_count": 9}, r"scenario\.known_count: 9 is not between 1 and the 5 classes of toy"),
        ({"known": (0, 0)}, r"scenario\.known: \[0, 0\] must be different classes from 0 to 4"),
        ({"known": (1, 5)}, r"scenario\.known: \[1, 5\] must be"),
        ({"known": ()}, r"scenario\.known: \[\] must be"),
        ({"known": (1, "class 1")}, r"scenario\.known: \[1, 'class 1'\] must be different"),
        ({"known": (1, "Class3")}, r"scenario\.known: toy has no class 'Class3'; did you mean 'class 3'\?"),
        ({"classes": "open"}, r"scenario\.classes=open needs classes that are not known: give fewer than 5"),
        ({"classes": "novel", "known_count": 5}, r"scenario\.classes=novel needs"),
        ({"labelled_fraction": None, "labelled_per_class": 21}, r"scenario\.labelled_per_class: 21 .* only 20"),
        ({"partition": "folders"}, r"scenario\.partition=folders: toy does not say"),
        ({"partition": "irichlet", "alpha": 1.0}, r"scenario\.partition: 'irichlet'.*dirichlet"),
        ({"partition": "dirichlet"}, r"scenario\.alpha: missing"),
    ],
)
def test_mistakes_name_their_key(changes: dict[str, Any], words: str) -> None:
    chosen = settings_of(**{"labelled_fraction": 0.5, **changes})
    with pytest.raises(UserError, match=words):
        build_scenario(toy_dataset(size=2), chosen, VIEWS, 0)


def test_known_classes_may_be_given_by_name() -> None:
    dataset = toy_dataset(size=2)
    chosen = [
        build_scenario(dataset, settings_of(labelled_fraction=0.5, classes="open", known=known), VIEWS, 0)
        for known in ((1, 3), ("class 3", "class 1"), ("class 3", 1))
    ]
    assert [one.known for one in chosen] == [(1, 3)] * 3
    assert chosen[1].class_names() == ["class 1", "class 3"]


def test_no_images_left_is_told() -> None:
    dataset = toy_dataset(size=2)
    lonely = dataset._replace(x_train=dataset.x_train[4::5], y_train=dataset.y_train[4::5])
    with pytest.raises(UserError, match="'toy' has no training images left"):
        build_scenario(lonely, settings_of(labelled_fraction=0.5, known=(0, 1)), VIEWS, 0)


@given(worlds(), st.sampled_from([0.1, 0.4]))
@settings(max_examples=40, deadline=None)
def test_validation_images_are_at_no_client(world: tuple[Dataset, Any, int], share: float) -> None:
    dataset, chosen, seed = world
    chosen.validation_fraction = share
    views = Views((), (), dataset.mean, dataset.std)
    try:
        scenario = build_scenario(dataset, chosen, views, seed)
    except UserError:
        return  # too few images for these clients
    if scenario.validation is None:
        return
    kept = set(scenario.validation.labelled.tolist())
    assert len(scenario.validation.unlabelled) == 0
    for client in range(chosen.clients):
        held = scenario.client(client)
        assert not kept & {*held.labelled.tolist(), *held.unlabelled.tolist()}
    truth = [scenario.known.index(int(dataset.y_train[image])) for image in scenario.validation.labelled]
    assert scenario.validation.labels.tolist() == truth


def test_a_share_that_leaves_nobody_a_label_is_refused() -> None:
    dataset = toy_dataset(per_class=12, classes=3, size=2)
    with pytest.raises(UserError, match=r"labelled_fraction: 0.05 leaves nobody a label.* more than 9 images.*; 0.11 "):
        build_scenario(dataset, settings_of(labelled_fraction=0.05), VIEWS, 0)
    enough = build_scenario(dataset, settings_of(labelled_fraction=0.11), VIEWS, 0)
    assert [len(held.labelled) for held in enough.holdings] == [1, 1, 1, 1]


def test_clients_that_were_drawn_for_labels_and_have_nothing_to_label_are_told() -> None:
    """Two clients of folders: the one with labels holds unknown images alone."""
    dataset = toy_dataset(per_class=12, classes=3, size=2)
    apart = dataset._replace(owner=(dataset.y_train == 2).long())
    split = {"classes": "open", "known_count": 2, "clients": 2, "partition": "folders"}
    told = settings_of(labels="some-clients", labelled_clients=1, **split)
    outcomes: list[object] = []
    for seed in range(8):
        try:
            outcomes.append(sum(len(held.labelled) for held in build_scenario(apart, told, VIEWS, seed).holdings))
        except UserError as error:
            outcomes.append(str(error))
    refusal = "scenario.labelled_clients: the 1 that were drawn hold no image of a known class, so nobody has a label"
    assert set(outcomes) == {24, f"{refusal}; give more, or another seed"}


def test_a_known_class_may_not_be_called_as_rejected_images_are() -> None:
    dataset = toy_dataset(per_class=5, classes=3, size=2)._replace(classes=("cat", "unknown", "dog"))
    with pytest.raises(UserError, match=r"scenario\.known: class 1 of toy is called 'unknown'"):
        build_scenario(dataset, settings_of(labelled_per_class=1, known=(0, 1)), VIEWS, 0)
    build_scenario(dataset, settings_of(labelled_per_class=1, known=(0, 2), classes="open"), VIEWS, 0)


def test_a_class_with_too_few_images_is_told_by_its_name() -> None:
    dataset = toy_dataset(per_class=5, classes=4, size=2)._replace(classes=("ant", "bee", "cat", "dog"))
    scarce = dataset._replace(y_train=torch.where(dataset.y_train == 3, 0, dataset.y_train))
    with pytest.raises(UserError, match=r"only 0 training images of class 3 \(dog\)"):
        build_scenario(scarce, settings_of(labelled_per_class=2, known=(1, 3), classes="open"), VIEWS, 0)

"""The AGCL-style method: FINCH, Gaussians of groups and their merging against SciPy and plain loops."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from semifed.client_round import Task, client_round
from semifed.data.client import Budget, batches
from semifed.discovery.finch import finch
from semifed.discovery.gaussians import (
    LEAST_VARIANCE,
    Mixture,
    fitted_mixture,
    gaussian_contrast,
    local_groups,
    log_densities,
    merged_mixture,
)
from semifed.discovery.objectives import unit
from semifed.methods.fed_agcl import Associated
from semifed.payloads import Visit
from toys import place_of, site_of, toy_dataset, toy_parts, toy_recipe


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def around(directions: Tensor, each: int, spread: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Points near given directions, and which they are near."""
    member = torch.arange(len(directions)).repeat_interleave(each)
    return directions[member] + spread * drawn(len(member), directions.shape[1], seed=seed), member


NONE = torch.full((40,), -1)


def first_neighbour_groups(points: np.ndarray, labels: list[int]) -> list[int]:
    """Components of first neighbours, or of images of the same label, by spreading the smallest number along links."""
    unit = points / np.linalg.norm(points, axis=1, keepdims=True)
    similarity = unit @ unit.T
    np.fill_diagonal(similarity, -9)
    first = similarity.argmax(axis=1)
    group = list(range(len(points)))
    linked = [
        (i, j)
        for i in range(len(points))
        for j in range(len(points))
        if (j == first[i] if labels[i] < 0 else labels[i] == labels[j])
    ]
    for _ in points:
        for i, j in linked:
            group[i] = group[j] = min(group[i], group[j])
    return group


def same_partition(one: Tensor, other: list[int]) -> bool:
    pairs = set(zip(one.tolist(), other, strict=True))
    return len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})


def test_finchs_finest_level_are_components_of_first_neighbours() -> None:
    points, _ = around(drawn(5, 6, seed=4), 8, 0.6)
    assert same_partition(finch(points, NONE)[0], first_neighbour_groups(points.numpy(), NONE.tolist()))


@pytest.mark.parametrize("classes", [1, 3, 5])
@pytest.mark.parametrize("seed", range(4))
def test_no_group_of_the_finest_level_has_two_labels(classes: int, seed: int) -> None:
    points = drawn(40, 3, seed=seed)  # classes overlap: most first neighbours are of another one
    labels = torch.where(drawn(40, seed=seed + 9) > 0, torch.arange(40) % classes, -1)
    labels[0] = classes  # alone with its label: linked to nothing by itself
    finest = finch(points, labels)[0]
    assert same_partition(finest, first_neighbour_groups(points.numpy(), labels.tolist()))
    named = labels >= 0
    assert same_partition(finest[named], labels[named].tolist())


def test_classes_that_overlap_are_not_taken_for_one_group() -> None:
    """One labelled image beside one of another class once joined both, at every level: all known classes were one."""
    points, truth = around(torch.eye(4), 10, 0.4)
    labels = torch.where(torch.arange(40) % 2 == 0, truth, -1)
    groups = local_groups(points, labels, 4)
    assert len(groups[labels >= 0].unique()) == 4


def test_levels_of_finch_are_nested_and_find_clear_groups() -> None:
    points, truth = around(torch.eye(4), 10, 0.05)
    levels = finch(points, NONE)
    assert len(levels) > 1
    for fine, coarse in pairwise(levels):
        assert int(coarse.max()) < int(fine.max())
        for group in fine.unique():
            assert len(coarse[fine == group].unique()) == 1
    for group in levels[0].unique():
        assert len(truth[levels[0] == group].unique()) == 1


def test_a_shared_label_links_from_the_start() -> None:
    points, truth = around(torch.eye(4), 10, 0.05)
    labels = NONE.clone()
    labels[[0, 15]] = 3  # one of the first and one of the second direction
    finest = finch(points, labels)[0]
    assert finest[0] == finest[15]
    assert len(finest[truth == 3].unique()) == len(finch(points, NONE)[0][truth == 3].unique())


@pytest.mark.parametrize("count", [0, 1, 2])
def test_finch_of_hardly_any_points(count: int) -> None:
    levels = finch(drawn(count, 3), torch.full((count,), -1))
    assert len(levels) == 1
    assert levels[0].tolist() == [0] * count


def test_the_partition_that_names_labels_best_is_taken() -> None:
    points, truth = around(torch.eye(4), 10, 0.05)
    labels = torch.where(torch.arange(40) % 10 < 8, truth, -1)
    assert same_partition(local_groups(points, labels, 4), truth.tolist())
    # Where labels say that two directions are one class, a coarser partition is as right.
    coarser = local_groups(points, labels // 2, 2)
    assert len(coarser.unique()) <= 4
    unlabelled = local_groups(points, NONE, 4)
    assert torch.equal(unlabelled, finch(points, NONE)[-1])


def test_mean_and_variance_of_groups() -> None:
    points, member = drawn(30, 4), torch.arange(30) % 3
    mixture = fitted_mixture(points, member)
    for group in range(3):
        own = points[member == group].numpy()
        np.testing.assert_allclose(mixture.mean[group], own.mean(axis=0), atol=1e-6)
        np.testing.assert_allclose(mixture.variance[group], own.var(axis=0), atol=1e-6)
    assert mixture.images.tolist() == [10, 10, 10]
    lonely = fitted_mixture(points[:1], torch.tensor([0]))
    assert lonely.variance.tolist() == [pytest.approx([LEAST_VARIANCE] * 4)]


def test_log_densities_are_those_of_scipy_by_dimension() -> None:
    points = drawn(5, 3)
    mixture = Mixture(drawn(2, 3, seed=1), drawn(2, 3, seed=2).abs() + 0.1, torch.tensor([4.0, 2.0]))
    found = log_densities(points, mixture)
    for group in range(2):
        density = stats.multivariate_normal(mixture.mean[group].numpy(), np.diag(mixture.variance[group].numpy()))
        np.testing.assert_allclose(found[:, group], density.logpdf(points.numpy()) / 3, rtol=1e-4)


def test_contrast_makes_the_own_distance_larger() -> None:
    points, member = drawn(4, 3), torch.tensor([0, 1, 1, 0])
    mixture = Mixture(drawn(2, 3, seed=1), drawn(2, 3, seed=2).abs() + 0.1, torch.tensor([1.0, 1.0]))
    found = gaussian_contrast(points, member, mixture, 0.3)
    for i, own in enumerate(member.tolist()):
        terms = []
        for group in range(2):
            value = 0.0
            for axis in range(3):
                variance = float(mixture.variance[group, axis])
                squared = (float(points[i, axis]) - float(mixture.mean[group, axis])) ** 2 / variance
                value -= ((1.3 if group == own else 1.0) * squared + math.log(2 * math.pi * variance)) / 2
            terms.append(value / 3)
        expected = -terms[own] + math.log(sum(math.exp(term) for term in terms))
        assert float(found[i]) == pytest.approx(expected, rel=1e-4)


def test_merged_gaussians_have_the_moments_of_all_their_images() -> None:
    points, truth = around(torch.eye(6), 20, 0.3)  # so far apart that no variance is below the least
    points = unit(points)  # what others claim is cut down to what unit vectors can have
    at = [truth < 3, truth >= 3]  # the first client holds directions 0 to 2, the second the others
    halves = [torch.arange(120) % 2 == 0, torch.arange(120) % 2 == 1]  # both hold all
    for split in (halves, at):
        mixtures = [fitted_mixture(points[own], truth[own] - truth[own].min()) for own in split]
        merged = merged_mixture([mixture.padded(10) for mixture in mixtures], 16).present
        assert float(merged.images.sum()) == 120
        total = (merged.images[:, None] * merged.mean).sum(dim=0) / 120
        torch.testing.assert_close(total, points.mean(dim=0))
        second = (merged.images[:, None] * (merged.variance + merged.mean**2)).sum(dim=0) / 120
        torch.testing.assert_close(second, (points**2).mean(dim=0), rtol=1e-4, atol=1e-5)
    pairs = merged_mixture([fitted_mixture(points[own], truth[own]) for own in halves], 16).present
    assert len(pairs.images) == 6, "halves of one direction are each other's first neighbours"


def test_padding_keeps_the_largest_groups() -> None:
    mixture = Mixture(torch.arange(6.0).reshape(3, 2), torch.ones(3, 2), torch.tensor([1.0, 5.0, 3.0]))
    assert mixture.padded(2).images.tolist() == [5, 3]
    wide = mixture.padded(5)
    assert wide.images.tolist() == [5, 3, 1, 0, 0]
    assert wide.present.mean.tolist() == [[2, 3], [4, 5], [0, 1]]
    assert [tuple(part.shape) for part in wide] == [(5, 2), (5, 2), (5,)]


def test_groups_of_all_clients_enter_the_loss_from_the_second_round_on() -> None:
    weights = {"unsupervised_share": 0.6, "group_weight": 0.3, "shared_weight": 0.7}
    parts = toy_parts(toy_recipe("fed-agcl", "clients", {"method": weights}), toy_dataset(per_class=40))
    place, site = place_of(parts), site_of(parts, 1)
    server: Associated = parts.method.setup(place.net.state(), site)
    first = [client_round(place, Task(1, one, 0.01, None), server, parts.scenario.client(one)) for one in (0, 1)]
    assert all(reply.record.terms["shared_groups"] == 0 for reply in first)
    assert all(reply.record.terms["groups"] > 0 for reply in first)
    server = parts.method.aggregate(server, [reply.up for reply in first], site)
    assert float(server.groups.images.sum()) == sum(float(reply.up.groups.images.sum()) for reply in first)
    second = client_round(place, Task(2, 0, 0.01, None), server, parts.scenario.client(0))
    assert second.record.terms["shared_groups"] > 0
    local = parts.method.prepare(place.net, server, parts.scenario.client(0), None, Visit(0, 2, 0))
    for group in local.const.member.unique():
        assert len(local.const.shared_member[local.const.member == group].unique()) == 1
    place.net.network.train()
    loss = parts.method.loss(place.net, next(iter(batches(local.data, Budget(1, None, 6), (0,)))), local.const)
    terms = {name: term.item() for name, term in loss.terms.items()}
    apart = 0.6 * terms["contrast"] + 0.4 * terms["supervised_contrast"]
    assert loss.value.item() == pytest.approx(apart + 0.3 * terms["groups"] + 0.7 * terms["shared_groups"], rel=1e-5)

"""K-means with labels, against scikit-learn without them and against plain loops with them."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.cluster import KMeans as TheirKMeans

from semifed.discovery import neighbours
from semifed.discovery.semi_kmeans import (
    estimated_clusters,
    lloyd,
    nearest_centres,
    semi_supervised_kmeans,
    spread_centres,
)
from semifed.metrics import ari

Array = NDArray[np.float64]
seeds = st.integers(0, 999)


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def blobs(classes: int, each: int, seed: int = 0, spread: float = 0.3) -> tuple[torch.Tensor, torch.Tensor]:
    which = torch.arange(classes).repeat(each)
    return 3 * torch.eye(classes)[which] + spread * torch.randn(len(which), classes, generator=stream(seed)), which


def nothing(width: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(0, width), torch.empty(0, dtype=torch.int64)


def plain_lloyd(
    points: Array, labelled: Array, fixed: list[int], centres: Array, rounds: int
) -> tuple[list[int], Array]:
    """The definition, point by point; no cluster may run empty."""

    def assigned() -> list[int]:
        return [int(np.argmin([((point - centre) ** 2).sum() for centre in centres])) for point in points]

    for _ in range(rounds):
        member = assigned()
        centres = np.stack(
            [
                np.mean(
                    [point for point, own in zip(points, member, strict=True) if own == cluster]
                    + [point for point, own in zip(labelled, fixed, strict=True) if own == cluster],
                    axis=0,
                )
                for cluster in range(len(centres))
            ]
        )
    return assigned(), centres


@given(seeds)
def test_without_labels_it_is_scikit_learns_from_the_same_centres(seed: int) -> None:
    points = torch.randn(80, 4, generator=stream(seed))
    centres = spread_centres(points, torch.empty(0, 4), 5, stream(seed))
    ours = lloyd(points, *nothing(4), centres, iterations=300, tolerance=0.0)
    theirs = TheirKMeans(5, init=centres.numpy(), n_init=1, algorithm="lloyd", tol=0).fit(points.numpy())
    np.testing.assert_array_equal(ours.member.numpy(), theirs.labels_)
    np.testing.assert_allclose(ours.centres.numpy(), theirs.cluster_centers_, atol=1e-5)
    assert ours.inertia == pytest.approx(theirs.inertia_, rel=1e-5)


@given(seeds, st.integers(0, 4))
def test_labelled_points_pull_their_centres_and_never_leave_them(seed: int, rounds: int) -> None:
    draws = stream(seed)
    points, labelled = torch.randn(30, 3, generator=draws), torch.randn(12, 3, generator=draws)
    fixed = torch.arange(12) % 4  # so that no cluster runs empty, however odd its labels
    centres = torch.randn(4, 3, generator=draws)
    ours = lloyd(points, labelled, fixed, centres, iterations=rounds, tolerance=-1.0)
    member, expected = plain_lloyd(
        points.double().numpy(), labelled.double().numpy(), fixed.tolist(), centres.double().numpy(), rounds
    )
    assert ours.member.tolist() == member
    np.testing.assert_allclose(ours.centres.numpy(), expected, atol=1e-5)
    inertia = sum(
        float(((point - expected[own]) ** 2).sum())
        for point, own in zip(
            [*points.double().numpy(), *labelled.double().numpy()], [*member, *fixed.tolist()], strict=True
        )
    )
    assert ours.inertia == pytest.approx(inertia, rel=1e-5)


@given(seeds, st.integers(1, 40))
def test_distances_are_the_same_for_any_block(seed: int, block: int) -> None:
    points, centres = torch.randn(20, 3, generator=stream(seed)), torch.randn(6, 3, generator=stream(seed + 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(neighbours, "BLOCK", block)
        member, distance = nearest_centres(points, centres)
    each = ((points[:, None].double() - centres.double()) ** 2).sum(dim=2)
    assert torch.equal(member, each.argmin(dim=1))
    torch.testing.assert_close(distance.double(), each.amin(dim=1), atol=1e-5, rtol=1e-5)


def test_clusters_are_the_labelled_classes_by_rising_label_and_then_novel_ones() -> None:
    points, which = blobs(6, 30)
    seen = torch.isin(which, torch.tensor([1, 3, 4]))
    told = seen & (torch.arange(len(which)) < 90)
    names = torch.tensor([-9, 70, -9, 11, 35, -9])  # class 3 has the lowest label, then 4, then 1
    found = semi_supervised_kmeans(points[~told], points[told], names[which[told]], 6, generator=stream())
    rest = which[~told]
    for cluster, blob in enumerate([3, 4, 1]):
        assert found.member[rest == blob].unique().tolist() == [cluster]
    assert ari(found.member, rest) == 1
    assert found.centres.shape == (6, 6)


def test_the_best_of_several_starts_is_kept() -> None:
    points, _ = blobs(8, 12, spread=0.4)
    alone = [semi_supervised_kmeans(points, *nothing(8), 8, generator=stream(5), tries=1).inertia]
    draws = stream(5)
    alone = [semi_supervised_kmeans(points, *nothing(8), 8, generator=draws, tries=1).inertia for _ in range(6)]
    assert len(set(alone)) > 1
    assert semi_supervised_kmeans(points, *nothing(8), 8, generator=stream(5), tries=6).inertia == min(alone)


def test_it_stops_when_the_centres_hardly_move() -> None:
    points = torch.randn(300, 2, generator=stream())
    centres = points[:8].clone()
    short, long = (lloyd(points, *nothing(2), centres, iterations=200, tolerance=level) for level in (1.0, 0.0))
    one = lloyd(points, *nothing(2), centres, iterations=1, tolerance=0.0)
    assert one.inertia >= short.inertia > long.inertia
    shift = float((one.centres - centres).norm(dim=1).sum()) ** 2
    for level, same in ((1.01 * shift, True), (0.99 * shift, False)):
        stopped = lloyd(points, *nothing(2), centres, iterations=200, tolerance=level)
        assert torch.equal(stopped.centres, one.centres) == same


def test_an_empty_cluster_moves_to_the_furthest_point() -> None:
    points = torch.tensor([[0.0], [1.0], [2.0], [30.0]])
    found = lloyd(points, *nothing(1), torch.tensor([[1.0], [900.0]]), iterations=50, tolerance=0.0)
    assert found.member.tolist() == [0, 0, 0, 1]
    assert found.centres.flatten().tolist() == [1, 30]


def test_copies_of_few_points_do_not_break_it() -> None:
    points = torch.tensor([[0.0, 1.0], [1.0, 0.0]]).repeat(10, 1)
    found = semi_supervised_kmeans(points, *nothing(2), 5, generator=stream())
    assert found.inertia == 0
    assert found.centres.isfinite().all()
    labelled = semi_supervised_kmeans(points, points[:2], torch.tensor([0, 1]), 2, generator=stream())
    assert labelled.member.tolist() == [0, 1] * 10
    assert (
        semi_supervised_kmeans(points[:0], points[:2], torch.tensor([0, 1]), 2, generator=stream()).member.tolist()
        == []
    )


def test_far_points_are_drawn_as_centres_by_their_squared_distance() -> None:
    points = torch.tensor([[1.0], [2.0], [3.0]])
    drawn = torch.zeros(3)
    draws = stream()
    for _ in range(2000):
        drawn[int(spread_centres(points, torch.zeros(1, 1), 2, draws)[1, 0]) - 1] += 1
    np.testing.assert_allclose(drawn.numpy() / 2000, np.array([1, 4, 9]) / 14, atol=0.035)


def test_numbers_of_clusters_that_cannot_be_are_refused() -> None:
    points, which = blobs(3, 4)
    for clusters in (2, 16):
        with pytest.raises(ValueError, match="clusters: expected"):
            semi_supervised_kmeans(points, points, which, clusters, generator=stream())
    with pytest.raises(ValueError, match="clusters: expected"):
        semi_supervised_kmeans(points, *nothing(3), 0, generator=stream())


def test_the_number_of_clusters_is_found_by_the_labelled_classes() -> None:
    points, which = blobs(9, 20)
    told = (which < 5) & (torch.arange(len(which)) % 2 == 0)
    found = estimated_clusters(points[~told], points[told], which[told], 30, generator=stream(), tries=5)
    assert 7 <= found <= 12
    assert found == estimated_clusters(points[~told], points[told], which[told], 30, generator=stream(), tries=5)
    assert estimated_clusters(points[~told], points[told], which[told], 5, generator=stream()) == 5
    with pytest.raises(ValueError, match="labels: expected some"):
        estimated_clusters(points, *nothing(9), 5, generator=stream())
    with pytest.raises(ValueError, match="most: expected at least"):
        estimated_clusters(points[~told], points[told], which[told], 4, generator=stream())

"""Nearest neighbours against a full sort and against faiss."""

import faiss
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from semifed.discovery import neighbours
from semifed.discovery.neighbours import nearest_neighbours


def directions(seed: int, count: int, width: int = 6) -> torch.Tensor:
    return F.normalize(torch.randn(count, width, generator=torch.Generator().manual_seed(seed)), dim=1)


@given(st.integers(0, 99), st.integers(1, 25), st.integers(1, 30), st.integers(1, 60))
def test_it_is_a_full_sort_for_any_block(seed: int, count: int, k: int, block: int) -> None:
    unit = directions(seed, count)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(neighbours, "BLOCK", block)
        found = nearest_neighbours(unit, k)
    assert found.similarity.shape == found.node.shape == (count, min(k, count - 1))
    points = unit.double().numpy()
    for image, others in enumerate(found.node.tolist()):
        ranked = sorted((j for j in range(count) if j != image), key=lambda j: -float(points[image] @ points[j]))
        assert others == ranked[: len(others)]
        np.testing.assert_allclose(found.similarity[image].numpy(), points[others] @ points[image], atol=1e-6)


def test_an_image_is_not_its_own_neighbour_though_it_has_copies() -> None:
    unit = directions(0, 4).repeat(5, 1)
    found = nearest_neighbours(unit, 4)
    for image, others in enumerate(found.node.tolist()):
        assert sorted([image, *others]) == list(range(image % 4, 20, 4))
    torch.testing.assert_close(found.similarity, torch.ones(20, 4))


def test_nobody_and_a_lonely_image_have_no_neighbours() -> None:
    assert nearest_neighbours(torch.empty(0, 3), 5).node.shape == (0, 0)
    assert nearest_neighbours(torch.ones(1, 3), 5).similarity.shape == (1, 0)


def test_it_finds_what_faiss_finds() -> None:
    unit = directions(1, 700, 32)
    index = faiss.IndexFlatIP(32)
    index.add(unit.numpy())
    similarity, node = index.search(unit.numpy(), 11)
    found = nearest_neighbours(unit, 10)
    assert (node[:, 0] == np.arange(700)).all()
    np.testing.assert_array_equal(found.node.numpy(), node[:, 1:])
    np.testing.assert_allclose(found.similarity.numpy(), similarity[:, 1:], atol=1e-6)

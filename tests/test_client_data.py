"""What a party holds and the batches drawn from it: passes, tails, balance, and streams by address."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semifed.data.client import SMALLEST_TAIL, Batch, Budget, ClientData, Samples, batches
from semifed.data.views import Views
from semifed.models.network import build_network
from semifed.net import Net
from toys import toy_dataset

IMAGES = toy_dataset(per_class=40).x_train
VIEWS = Views.parse("flip crop(2)", "flip crop(2) cutout(3)", mean=(0.5,), std=(0.25,))


def data_of(labelled: int, unlabelled: int) -> ClientData:
    positions = torch.randperm(len(IMAGES), generator=torch.Generator().manual_seed(0))
    labels = torch.arange(labelled) % 3
    return ClientData(IMAGES, positions[:labelled], labels, positions[labelled : labelled + unlabelled], VIEWS)


def drawn(data: ClientData, budget: Budget, address: tuple[int | str, ...] = (0, 1, 2)) -> list[Batch]:
    return list(batches(data, budget, address))


counts = st.integers(0, 60)


@given(counts, st.integers(1, 60), st.integers(1, 20), st.integers(1, 3), st.integers(1, 3))
def test_an_epoch_passes_once_over_the_unlabelled_images(
    labelled: int, unlabelled: int, batch: int, ratio: int, epochs: int
) -> None:
    steps = drawn(data_of(labelled, unlabelled), Budget(epochs, None, batch, ratio))
    size = batch * ratio
    whole, tail = divmod(unlabelled, size)
    kept_tail = tail if whole == 0 or tail >= min(SMALLEST_TAIL, size) else 0
    sizes = [size] * whole + ([kept_tail] if kept_tail else [])
    assert [len(step.unlabelled) for step in steps] == sizes * epochs
    for epoch in range(epochs):
        pass_ = steps[epoch * len(sizes) : (epoch + 1) * len(sizes)]
        seen = torch.cat([step.unlabelled.position for step in pass_]).tolist()
        assert len(set(seen)) == len(seen) == sum(sizes)
    assert all(len(step.labelled) == (batch if labelled else 0) for step in steps)
    assert all(len(step.unlabelled.labels) == 0 for step in steps)


@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 3))
def test_without_unlabelled_images_the_labelled_ones_lead(labelled: int, batch: int, ratio: int) -> None:
    data = data_of(labelled, 0)
    steps = drawn(data, Budget(2, None, batch, ratio))
    assert all(len(step.unlabelled) == 0 for step in steps)
    first = steps[: len(steps) // 2]
    seen = torch.cat([step.labelled.position for step in first]).tolist()
    assert len(set(seen)) == len(seen)
    dropped = labelled - len(seen)
    assert dropped < min(SMALLEST_TAIL, batch)
    assert dropped in (0, labelled % batch)


@given(st.integers(1, 20), st.integers(1, 60), st.integers(1, 12))
def test_labelled_images_come_equally_often(labelled: int, unlabelled: int, batch: int) -> None:
    seen: Counter[int] = Counter(dict.fromkeys(range(labelled), 0))
    for step in drawn(data_of(labelled, unlabelled), Budget(None, 9, batch)):
        seen.update(step.labelled.position.tolist())
        assert max(seen.values()) - min(seen.values()) <= 1


@given(counts, counts, st.integers(1, 30), st.integers(1, 15))
def test_a_number_of_steps_is_that_many(labelled: int, unlabelled: int, batch: int, steps: int) -> None:
    found = drawn(data_of(labelled, unlabelled), Budget(None, steps, batch))
    assert len(found) == (steps if labelled + unlabelled else 0)


def test_steps_beyond_an_epoch_start_another_pass() -> None:
    steps = drawn(data_of(0, 20), Budget(None, 5, 10))
    passes = [torch.cat([steps[i].unlabelled.position, steps[i + 1].unlabelled.position]) for i in (0, 2)]
    assert all(sorted(one.tolist()) == list(range(20)) for one in passes)
    assert not torch.equal(*passes)


def test_batches_hold_the_right_images_and_labels() -> None:
    data = data_of(7, 30)
    for step in drawn(data, Budget(1, None, 4, 2)):
        assert torch.equal(step.labelled.raw, IMAGES[data.labelled[step.labelled.position]])
        assert torch.equal(step.labelled.labels, data.labels[step.labelled.position])
        assert torch.equal(step.unlabelled.raw, IMAGES[data.unlabelled[step.unlabelled.position]])


@pytest.mark.parametrize(("labelled", "unlabelled"), [(0, 1), (1, 0), (1, 1), (3, 2)])
def test_a_batch_larger_than_the_data_takes_all_of_it(labelled: int, unlabelled: int) -> None:
    (step,) = drawn(data_of(labelled, unlabelled), Budget(1, None, 16))
    assert sorted(step.unlabelled.position.tolist()) == list(range(unlabelled))
    if unlabelled == 0:
        assert sorted(step.labelled.position.tolist()) == list(range(labelled))
    assert step.labelled.weak.shape == (len(step.labelled), 1, 8, 8)
    assert step.unlabelled.strong.shape == (unlabelled, 1, 8, 8)


def test_nothing_held_nothing_drawn() -> None:
    assert drawn(data_of(0, 0), Budget(3, None, 4)) == []


def views_of(step: Batch) -> list[torch.Tensor]:
    parts = (step.labelled, step.unlabelled)
    return [view for part in parts for view in (part.weak, part.strong, part.flipped)]


def test_an_address_decides_order_and_views() -> None:
    data = data_of(9, 40)
    budget = Budget(1, None, 8)
    once, again, elsewhere = (drawn(data, budget, address) for address in ((0, 1, 2), (0, 1, 2), (0, 1, 3)))
    for one, same, other in zip(once, again, elsewhere, strict=True):
        assert torch.equal(one.unlabelled.position, same.unlabelled.position)
        assert torch.equal(one.labelled.position, same.labelled.position)
        assert not torch.equal(one.unlabelled.position, other.unlabelled.position)
        for view, equal in zip(views_of(one), views_of(same), strict=True):
            assert torch.equal(view, equal)


def test_views_do_not_depend_on_the_order_in_which_they_are_asked_for() -> None:
    (one, *_), (other, *_) = (drawn(data_of(9, 40), Budget(1, None, 8)) for _ in range(2))
    forwards = views_of(one)
    backwards = [
        view
        for part in (other.unlabelled, other.labelled)
        for view in (part.flipped, part.strong, part.plain, part.weak)[0:4]
    ]
    flipped, strong, _, weak = backwards[:4]
    assert torch.equal(forwards[3], weak)
    assert torch.equal(forwards[4], strong)
    assert torch.equal(forwards[5], flipped)
    assert torch.equal(forwards[0], backwards[7])


def test_a_later_step_does_not_depend_on_views_of_earlier_ones() -> None:
    budget = Budget(1, None, 8)
    lazy = drawn(data_of(9, 40), budget)[-1]
    eager = [views_of(step) for step in batches(data_of(9, 40), budget, (0, 1, 2))][-1]
    for one, other in zip(views_of(lazy), eager, strict=True):
        assert torch.equal(one, other)


def test_the_same_image_is_seen_differently_in_each_step_and_view() -> None:
    data = data_of(1, 12)
    steps = drawn(data, Budget(3, None, 6))
    weak = {step.labelled.weak[:1].numpy().tobytes() for step in steps}
    assert len(weak) > len(steps) // 2
    whole = drawn(data_of(0, 40), Budget(1, None, 40))[0].unlabelled
    assert not torch.equal(whole.weak, whole.strong)
    views = Views.parse("flip crop(2)", "flip crop(2)", mean=(0.5,), std=(0.25,))
    alike = Samples(whole.raw, whole.position, whole.labels, views, (0,))
    assert not torch.equal(alike.weak, alike.strong), "the two views must draw from streams of their own"


def test_a_view_is_drawn_once() -> None:
    step = drawn(data_of(4, 8), Budget(1, None, 4))[0]
    assert step.unlabelled.weak is step.unlabelled.weak


def test_plain_is_the_normalised_image() -> None:
    step = drawn(data_of(0, 8), Budget(1, None, 8))[0]
    expected = (step.unlabelled.raw.numpy().astype(np.float64) / 255 - 0.5) / 0.25
    np.testing.assert_allclose(step.unlabelled.plain.numpy(), expected, atol=1e-6)


def test_images_held_twice_count_once() -> None:
    data = data_of(4, 6)
    assert data.image_count == 10
    merged = data._replace(unlabelled=torch.cat([data.unlabelled, data.labelled]))
    assert merged.image_count == 10
    assert data_of(4, 0).image_count == 4
    assert data_of(0, 0).image_count == 0


@pytest.mark.parametrize("unlabelled", [0, 1, 7])
def test_plain_logits_are_those_of_the_plain_images(unlabelled: int) -> None:
    generator = torch.Generator().manual_seed(0)
    net = Net(build_network("cnn", channels=1, size=(8, 8), classes=3, width=(4, 4, 8), generator=generator), "static")
    data = data_of(3, unlabelled)
    found = data.plain_outputs(net).logits
    assert found.shape == (unlabelled, 3)
    assert not found.requires_grad
    if unlabelled:
        torch.testing.assert_close(found, net(VIEWS.plain(IMAGES[data.unlabelled])).logits.detach())


def test_outputs_in_several_batches_are_those_of_one() -> None:
    generator = torch.Generator().manual_seed(0)
    network = build_network(
        "cnn", channels=1, size=(8, 8), classes=3, width=(4, 4, 8), further={"side": 5}, generator=generator
    )
    net, data = Net(network, "static"), data_of(30, 100)
    many = data._replace(unlabelled=data.unlabelled.repeat(6))
    for found, positions in (
        (many.plain_outputs(net), many.unlabelled),
        (many.labelled_outputs(net), data.labelled),
    ):
        whole = net(VIEWS.plain(IMAGES[positions]))
        torch.testing.assert_close(found.logits, whole.logits.detach())
        torch.testing.assert_close(found.features, whole.features.detach())
        torch.testing.assert_close(found.heads["side"], whole.heads["side"].detach())


def test_the_second_strong_view_is_another_one_and_always_the_same() -> None:
    (one, *_), (again, *_) = (drawn(data_of(9, 40), Budget(1, None, 8)) for _ in range(2))
    for part, same in zip(one, again, strict=True):
        second = same.strong_again  # asked for first: views do not depend on the order
        assert torch.equal(part.strong, same.strong)
        assert torch.equal(part.strong_again, second)
        assert not torch.equal(part.strong, part.strong_again)
        assert part.strong_again.shape == part.strong.shape
        assert part.strong_again is part.strong_again


def test_streams_belong_to_step_part_and_purpose() -> None:
    first, second = drawn(data_of(9, 40), Budget(None, 2, 8))
    again = drawn(data_of(9, 40), Budget(None, 2, 8))[0]
    streams = [
        first.unlabelled.stream("mix"),
        first.unlabelled.stream("other"),
        first.labelled.stream("mix"),
        second.unlabelled.stream("mix"),
    ]
    draws = [torch.rand(4, generator=stream) for stream in streams]
    assert len({tuple(draw.tolist()) for draw in draws}) == 4
    assert torch.equal(draws[0], torch.rand(4, generator=again.unlabelled.stream("mix")))


@pytest.mark.parametrize("view", ["plain", "weak", "strong", "strong_again", "uncut", "flipped"])
def test_a_batch_knows_whether_anybody_looked(view: str) -> None:
    step = drawn(data_of(4, 8), Budget(1, None, 4))[0]
    assert not step.unlabelled.looked_at
    getattr(step.unlabelled, view)
    assert step.unlabelled.looked_at
    assert not step.labelled.looked_at


def test_views_of_steps_in_a_row_are_those_of_each_step_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    views = Views.parse("flip crop(2)", "flip crop(2) randaugment(2,10) cutout(3)", mean=(0.5,), std=(0.25,))
    data = data_of(9, 31)._replace(views=views)
    budget = Budget(epochs=2, steps=None, batch=4, unlabelled_ratio=2)
    names = ("plain", "weak", "weak_again", "strong", "strong_again", "uncut", "flipped")

    def all_views() -> list[torch.Tensor]:
        steps = drawn(data, budget)
        return [getattr(part, name) for step in steps for part in step for name in names]

    together = all_views()
    monkeypatch.setattr("semifed.data.client.IN_ONE_GO", 1)
    alone = all_views()
    assert len(together) == len(alone) == 2 * 3 * 2 * len(names)  # the last 7 of 31 images are too few for a step
    assert all(torch.equal(one, other) for one, other in zip(together, alone, strict=True))


def test_a_view_of_one_step_does_not_count_as_a_look_at_the_next() -> None:
    first, second, *_ = drawn(data_of(9, 31), Budget(epochs=1, steps=None, batch=4))
    assert len(first.unlabelled.strong) == 4
    assert first.unlabelled.looked_at
    assert not second.unlabelled.looked_at

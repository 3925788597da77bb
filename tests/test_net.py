"""The network as methods see it: joint passes, frozen copies, weights in and out."""

import copy

import pytest
import torch

from semifed.models.batchnorm import BatchNorm
from semifed.models.network import build_network
from semifed.net import FrozenNet, Net
from toys import equal_weights


def small_net(batchnorm: str = "static") -> Net:
    generator = torch.Generator().manual_seed(0)
    network = build_network(
        "cnn",
        channels=1,
        size=(8, 8),
        classes=3,
        width=(4, 4, 8),
        further={"ova": "linear", "side": 5},
        generator=generator,
    )
    return Net(network, batchnorm)


def images(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(seed))


def test_it_waits_in_evaluation_mode() -> None:
    assert not any(module.training for module in small_net().network.modules())


def test_a_joint_pass_is_one_pass_cut_into_its_groups() -> None:
    net = small_net()
    net.network.train()
    groups = [images(3), images(0), images(5, 1)]
    whole = net(torch.cat(groups))
    parts = net.joint(*groups)
    assert [len(part.logits) for part in parts] == [3, 0, 5]
    torch.testing.assert_close(torch.cat([part.logits for part in parts]), whole.logits)
    torch.testing.assert_close(torch.cat([part.features for part in parts]), whole.features)
    assert set(parts[0].heads) == {"ova", "side"}
    for name, values in whole.heads.items():
        torch.testing.assert_close(torch.cat([part.heads[name] for part in parts]), values)


def test_groups_of_a_joint_pass_share_their_statistics() -> None:
    net = small_net()
    net.network.train()
    alone, joint = net(images(4)).logits, net.joint(images(4), 5 + images(4, 1))[0].logits
    assert not torch.allclose(alone, joint, atol=1e-3)
    net.network.eval()
    torch.testing.assert_close(net(images(4)).logits, net.joint(images(4), images(4, 1))[0].logits)


def test_a_frozen_copy_neither_learns_nor_follows() -> None:
    net = small_net()
    net.network.train()
    teacher = net.frozen()
    assert isinstance(teacher, FrozenNet)
    net.network.eval()
    before = teacher(images(4))
    torch.testing.assert_close(before.logits, net(images(4)).logits.detach())
    assert not before.logits.requires_grad
    net.load({name: tensor + 1 for name, tensor in net.state().items()})
    torch.testing.assert_close(teacher(images(4)).logits, before.logits)
    assert all(parameter.requires_grad for parameter in net.named_parameters().values())


@pytest.mark.parametrize("batchnorm", ["static", "tracked"])
def test_a_teacher_may_normalise_by_its_batch_and_remembers_nothing_of_it(batchnorm: str) -> None:
    net = small_net(batchnorm)
    for layer in net.network.modules():
        if isinstance(layer, BatchNorm):
            layer.running_mean.fill_(0.5)
    before = net.state()
    teacher = net.frozen("batch")
    first = teacher(3 + images(6)).logits
    assert torch.equal(first, teacher(3 + images(6)).logits)
    assert not first.requires_grad
    assert not torch.allclose(first, net.frozen()(3 + images(6)).logits, atol=1e-3)
    assert equal_weights(before, net.state())
    net.network.train()
    assert torch.equal(first, net(3 + images(6)).logits.detach())


def test_a_state_is_a_copy() -> None:
    net = small_net()
    state = net.state()
    for tensor in state.values():
        tensor.fill_(9)
    assert not equal_weights(state, net.state())
    assert all(tensor.is_contiguous() for tensor in net.state().values())


def test_what_training_may_have_changed() -> None:
    statistics = {name for name in small_net().state() if "running_" in name}
    assert len(statistics) == 6
    assert set(small_net("static").trained()) == set(small_net().state()) - statistics
    assert set(small_net("tracked").trained()) == set(small_net().state())


def test_loading_takes_over_what_is_named_and_keeps_the_rest() -> None:
    net = small_net()
    before = net.state()
    net.load({"classifier.bias": torch.tensor([1.0, 2.0, 3.0])})
    after = net.state()
    assert after.pop("classifier.bias").tolist() == [1.0, 2.0, 3.0]
    del before["classifier.bias"]
    assert equal_weights(before, after)
    with pytest.raises(KeyError):
        net.load({"classifier.bios": torch.zeros(3)})


def test_state_and_load_are_inverse() -> None:
    net, other = small_net(), small_net()
    other.load({name: tensor * 2 for name, tensor in other.state().items()})
    other.load(net.state())
    assert equal_weights(net.state(), other.state())


def test_a_head_can_be_asked_about_given_features() -> None:
    net = small_net()
    seen = net(images(4))
    for name in ("ova", "side"):
        torch.testing.assert_close(net.head(name, seen.features), seen.heads[name])
    detached = net.head("side", seen.features.detach())
    detached.sum().backward()
    reached = {name for name, parameter in net.named_parameters().items() if parameter.grad is not None}
    assert reached == {name for name in net.named_parameters() if name.startswith("heads.side")}


def test_a_shifted_network_answers_and_teaches_as_one_whose_parameters_were_moved() -> None:
    net, moved = small_net(), small_net()
    generator = torch.Generator().manual_seed(4)
    names = [name for name in net.named_parameters() if "convs.1" in name or name.startswith("classifier")]
    offsets = {name: torch.randn(net.state()[name].shape, generator=generator) for name in names}
    moved.load({name: moved.state()[name] + offset for name, offset in offsets.items()})
    before = net.state()
    for one in (net, moved):
        one.network.train()
    seen, expected = net.shifted(offsets, images(5)), moved(images(5))
    torch.testing.assert_close(seen.logits, expected.logits)
    torch.testing.assert_close(seen.heads["ova"], expected.heads["ova"])
    for output in (seen, expected):
        (output.logits.square().sum() + output.heads["ova"].sum()).backward()
    for name, parameter in net.named_parameters().items():
        slope = moved.named_parameters()[name].grad
        assert (parameter.grad is None) == (slope is None)
        if slope is not None:
            torch.testing.assert_close(parameter.grad, slope)
    assert equal_weights(net.state(), before)
    assert not torch.allclose(net(images(5)).logits, seen.logits)


def test_private_layers_are_neither_sent_nor_trained_for_others() -> None:
    net = small_net("local")
    normalising = {name for name in net.state() if "norms." in name}
    assert len(normalising) == 12
    assert set(net.private()) == normalising
    assert set(net.trained_names()) == set(net.state()) - normalising
    assert small_net("static").private() == small_net("tracked").private() == {}
    copy = net.private()
    for tensor in copy.values():
        tensor.fill_(9)
    assert not equal_weights(copy, net.private())


@pytest.mark.parametrize(("batchnorm", "records"), [("static", False), ("tracked", True), ("local", True)])
def test_who_records_statistics(batchnorm: str, records: bool) -> None:
    net = small_net(batchnorm)
    before = net.state()
    net.network.train()
    net(images(6))
    changed = {name for name, tensor in net.state().items() if not torch.equal(tensor, before[name])}
    assert changed == ({name for name in before if "running_" in name} if records else set())


def test_a_deep_copy_loads_into_itself_alone() -> None:
    net = small_net("tracked")
    before, other = net.state(), copy.deepcopy(net)
    other.load({name: tensor + 1 for name, tensor in before.items()})
    assert equal_weights(net.state(), before)
    assert equal_weights(other.state(), {name: tensor + 1 for name, tensor in before.items()})
    assert not torch.equal(net(images(2)).logits, other(images(2)).logits)

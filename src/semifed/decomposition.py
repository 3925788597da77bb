"""FedMatch's decomposition θ = σ + ψ: labels move σ, unlabelled images ψ, and clients lend each other their ψ."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from semifed.data.client import ClientData, Samples
from semifed.fit import Loss
from semifed.losses import cross_entropy, kl_divergence, mean
from semifed.net import Net
from semifed.payloads import Visit
from semifed.pseudo import PseudoLabels
from semifed.rng import torch_stream
from semifed.shapes import ClientNumber, PerClass
from semifed.targets import opinion
from semifed.wire import Weights

NOISE = (125.0, 125.0)  # mean and deviation, in grey levels
Part = Literal["sigma", "psi"]


class Decomposed(NamedTuple):
    """Both parts of all kernels and matrices; biases and batch norm are of σ alone and in neither."""

    sigma: Weights
    psi: Weights
    turn: Part = "sigma"  # which part the coming step moves
    moved: Part | None = None  # which part the last step has moved, if it was taken

    def settled(self, weights: Mapping[str, Tensor]) -> "Decomposed":
        """The parts when their sum has become `weights`: what moved takes the change, the other keeps its bits."""
        if self.moved == "sigma":
            sigma = {name: weights[name].detach() - psi for name, psi in self.psi.items()}
            return self._replace(sigma=sigma, moved=None)
        if self.moved == "psi":
            psi = {name: weights[name].detach() - sigma for name, sigma in self.sigma.items()}
            return self._replace(psi=psi, moved=None)
        return self

    def passed(self, *, taken: bool) -> "Decomposed":
        """The other part's turn, after a step that was taken or not."""
        return self._replace(turn="psi" if self.turn == "sigma" else "sigma", moved=self.turn if taken else None)


def kernels(weights: Mapping[str, Tensor]) -> Weights:
    """The weights that are decomposed: those of more than one dimension."""
    return {name: tensor for name, tensor in weights.items() if tensor.ndim > 1}


def elected_label(probabilities: Tensor, helpers: Tensor) -> Tensor:
    """The class most models name, the own one [n, classes] and the helpers [h, n, classes]; of equals the first."""
    named = torch.cat([probabilities[None], helpers]).argmax(dim=2)
    return F.one_hot(named, probabilities.shape[1]).sum(dim=0).argmax(dim=1)


def helper_divergence(helpers: Tensor, logits: Tensor) -> Tensor:
    """(1/H) Σ_h KL(p_h‖p) of the helpers' probabilities [h, n, classes], [n]; 0 without helpers."""
    if len(helpers) == 0:
        return torch.zeros(len(logits))
    return torch.stack([kl_divergence(each, logits) for each in helpers]).mean(dim=0)


def absolute_sum(psi: Mapping[str, Tensor]) -> Tensor:
    """‖ψ‖₁ over all of its numbers."""
    return torch.stack([tensor.abs().sum() for tensor in psi.values()]).sum()


def squared_gap(sigma: Mapping[str, Tensor], psi: Mapping[str, Tensor]) -> Tensor:
    """‖σ − ψ‖² over all of their numbers."""
    return torch.stack([((sigma[name] - tensor) ** 2).sum() for name, tensor in psi.items()]).sum()


class PsiWeights(NamedTuple):
    """Weights of the terms that move ψ."""

    consistency: float  # lambda_a
    agreement: float  # lambda_ICCS
    sparsity: float  # lambda_L1
    attraction: float  # lambda_L2


def psi_objective(
    net: Net, unlabelled: Samples, sigma: Weights, helpers: Tensor, threshold: float, weights: PsiWeights
) -> Loss:
    """FedMatch's loss on unlabelled images: of the confident ones the strong view learns the elected label.

    `helpers` [h, n, classes] are the probabilities lent models give to these images. Gradients reach the decomposed
    weights only. Penalties alone are nothing to learn from: that takes a confident image, and a weight on what it says.
    """
    if len(unlabelled) == 0:
        return Loss(torch.zeros(()), {})
    whole = net.named_parameters()
    # Batch norm tracks in its own buffers, as in every pass of training, but with biases it is of σ: no gradient.
    fixed = {name: tensor.detach() for name, tensor in whole.items() if name not in sigma}
    seen = net.at({**fixed, **dict(net.network.named_buffers())}, torch.cat([unlabelled.plain, unlabelled.strong]))
    plain, strong = seen.logits.chunk(2)
    local = opinion(plain.softmax(dim=1), threshold)
    label = elected_label(local.probabilities, helpers)
    psi = {name: whole[name] - part for name, part in sigma.items()}
    terms = {
        "consistency": mean(cross_entropy(strong, label)[local.sure]),
        "agreement": mean(helper_divergence(helpers, plain)[local.sure]),
        "sparsity": absolute_sum(psi),
        "attraction": squared_gap(sigma, psi),
    }
    value = sum((getattr(weights, name) * term for name, term in terms.items()), start=torch.zeros(()))
    pseudo = PseudoLabels(unlabelled.position, label, local.sure, local)
    heard = weights.consistency > 0 or (weights.agreement > 0 and len(helpers) > 0)
    return Loss(value if heard and local.sure.any() else value.detach(), terms, pseudo=pseudo)


class Member(NamedTuple):
    """What a client tells the server of itself."""

    client: ClientNumber
    psi: Weights
    embedding: PerClass  # e, what its model says of the noise image


class Working(NamedTuple):
    """What a step of a client's training reads, and in the parts leaves to the next one."""

    parts: Decomposed
    helpers: Tensor  # [h, n, classes], what lent models say of all unlabelled images
    noise: Tensor  # the image all clients are compared by
    client: int

    def told(self, net: Net) -> Member:
        """What the client tells of itself when it has trained the network."""
        psi = self.parts.settled(net.named_parameters()).psi
        return Member(torch.tensor(self.client), psi, net(self.noise).logits.softmax(dim=1)[0])


def working(net: Net, data: ClientData, psi: Weights, helpers: Weights, visit: Visit) -> Working:
    """The start of a client's round: the network as received is σ + ψ; `helpers` are lent ψ [h, ...], if any."""
    whole = net.state()
    sigma = {name: whole[name] - part for name, part in psi.items()}
    noise = noise_image(data.images.shape[1:], torch_stream(visit.seed, "noise image"))
    opinions = helper_opinions(net, data, sigma, helpers)
    return Working(Decomposed(sigma, psi), opinions, data.views.plain(noise), visit.client)


def helper_opinions(net: Net, data: ClientData, sigma: Weights, psi: Weights) -> Tensor:
    """What models of the client's σ and lent ψ [h, ...] say of its unlabelled images as they are, [h, n, classes]."""
    count = max(map(len, psi.values()), default=0)
    models = [{name: sigma[name] + part[row] for name, part in psi.items()} for row in range(count)]
    said = [data.plain_outputs(partial(net.at, model)).logits.softmax(dim=1) for model in models]
    classes = len(sigma[net.class_rows])
    return torch.stack(said) if said else torch.empty(0, len(data.unlabelled), classes)


def noise_image(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """One image of Gaussian noise, uint8 [1, *shape]."""
    return torch.normal(*NOISE, (1, *shape), generator=generator).clamp(0, 255).round().to(torch.uint8)


class Members(NamedTuple):
    """What the server knows of the clients it has heard of, a row each, in the order of their numbers."""

    client: Tensor  # [m]
    psi: Weights  # [m, ...]
    embedding: Tensor  # [m, classes]

    def joined_by(self, members: Sequence[Member]) -> "Members":
        """All of them after some told of themselves; what these told before is forgotten."""
        latest = {int(each.client): each for each in members}
        if not latest:
            return self
        stay = [row for row, client in enumerate(self.client.tolist()) if client not in latest]
        client = torch.cat([self.client[stay], torch.tensor(list(latest))])
        order = client.argsort()

        def joined(old: Tensor, new: list[Tensor]) -> Tensor:
            return torch.cat([old[stay], torch.stack(new)])[order]

        return Members(
            client[order],
            {name: joined(old, [each.psi[name] for each in latest.values()]) for name, old in self.psi.items()},
            joined(self.embedding, [each.embedding for each in latest.values()]),
        )

    def helpers(self, client: int, count: int) -> Weights:
        """ψ of the others nearest to a client by embedding, [≤ count, ...]; none for one never heard of."""
        own = self.client == client
        if not own.any() or own.all():
            return {}
        distance = (self.embedding - self.embedding[own]).norm(dim=1).masked_fill(own, torch.inf)
        nearest = distance.argsort(stable=True)[: min(count, len(own) - 1)]
        return {name: psi[nearest] for name, psi in self.psi.items()}


def nobody(psi: Weights, classes: int) -> Members:
    """No members yet."""
    empty = {name: tensor.new_empty((0, *tensor.shape)) for name, tensor in psi.items()}
    return Members(torch.empty(0, dtype=torch.int64), empty, torch.empty(0, classes))

"""The terms of the objectives, once each: per-sample values; the caller masks, weights and reduces."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from semifed.wire import Weights


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """−log p(label) for each sample, [n]."""
    return F.cross_entropy(logits, labels, reduction="none")


def soft_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """−Σ_c target_c log p_c for each sample, [n]; equals KL(target‖p) up to the target's entropy."""
    return -(target * F.log_softmax(logits, dim=1)).sum(dim=1)


def mixed_cross_entropy(logits: Tensor, label: Tensor, other: Tensor, share: float) -> Tensor:
    """Mixup's share · CE(label) + (1 − share) · CE(other) for images mixed by that share, [n]."""
    return share * cross_entropy(logits, label) + (1 - share) * cross_entropy(logits, other)


def kl_divergence(reference: Tensor, logits: Tensor) -> Tensor:
    """KL(reference‖p) = Σ_c reference_c (log reference_c − log p_c) for given probabilities, [n]."""
    return torch.xlogy(reference, reference).sum(dim=1) + soft_cross_entropy(logits, reference)


def entropy(probabilities: Tensor) -> Tensor:
    """−Σ_c p_c log p_c of each sample, in nats, [n]."""
    return -torch.xlogy(probabilities, probabilities).sum(dim=1)


def squared_distance(logits: Tensor, target: Tensor) -> Tensor:
    """Σ_c (p_c − target_c)² for each sample, [n] (mean teacher, RSCFed)."""
    return ((logits.softmax(dim=1) - target) ** 2).sum(dim=1)


def mean(values: Tensor) -> Tensor:
    """The mean over a batch; 0, with a gradient of 0, for an empty one."""
    return values.sum() / max(len(values), 1)


def masked_mean(values: Tensor, used: Tensor) -> Tensor:
    """The mean over the whole batch in which samples that are not used count as 0 (FixMatch's reduction)."""
    return mean(values * used.to(values.dtype))


def proximal(weights: Mapping[str, Tensor], received: Weights) -> Tensor:
    """‖w − w_received‖² / 2 over the named weights (FedProx, eq. 2, without its factor μ)."""
    return (
        sum(
            (((tensor - received[name]) ** 2).sum() for name, tensor in weights.items()),
            start=Tensor([0.0])[0],
        )
        / 2
    )


def asam_offsets(weights: Mapping[str, Tensor], gradient: Mapping[str, Tensor], radius: float, floor: float) -> Weights:
    """ASAM's ascent ε = radius · D²g / ‖Dg‖ over all tensors with a gradient; 0 where the whole gradient is 0.

    D = |w| + floor for kernels and matrices, 1 for tensors of one dimension (biases and scales).
    """
    scale = {name: weights[name].detach().abs() + floor if weights[name].ndim > 1 else 1.0 for name in gradient}
    scaled = {name: scale[name] * slope for name, slope in gradient.items()}
    norm = torch.sqrt(torch.stack([slope.square().sum() for slope in scaled.values()]).sum())
    step = radius / norm.clamp(min=1e-16)
    return {name: step * scale[name] * slope for name, slope in scaled.items()}


def ova_positive(ova: Tensor, labels: Tensor) -> Tensor:
    """−log φ^known of the labelled class for one-vs-all logits [n, 2, classes], [n] (OpenMatch, SSB)."""
    return -_own_class(F.log_softmax(ova, dim=1)[:, 1], labels)


def ova_negatives(ova: Tensor, labels: Tensor) -> Tensor:
    """−Σ_{k≠label} log φ^unknown_k / K, [n]: SSB takes every other class and divides by all K."""
    unknown = -F.log_softmax(ova, dim=1)[:, 0]
    return (unknown.sum(dim=1) - _own_class(unknown, labels)) / ova.shape[2]


def ova_hardest_negative(ova: Tensor, labels: Tensor) -> Tensor:
    """max_{k≠label} −log φ^unknown_k, [n]: OpenMatch takes the worst of the other classes; 0 if there is none."""
    unknown = -F.log_softmax(ova, dim=1)[:, 0]
    own = F.one_hot(labels, ova.shape[2]).bool()
    return unknown.masked_fill(own, 0.0).max(dim=1).values


def ova_entropy(ova: Tensor) -> Tensor:
    """Entropy of each class's known/unknown decision, mean over classes, [n]."""
    log_phi = F.log_softmax(ova, dim=1)
    return -(log_phi.exp() * log_phi).sum(dim=1).mean(dim=1)


def soft_open_consistency(ova: Tensor, other: Tensor) -> Tensor:
    """OpenMatch's SOCR: squared distance of the decisions on two views, summed over classes, [n]."""
    return ((ova.softmax(dim=1) - other.softmax(dim=1)) ** 2).sum(dim=(1, 2))


def pseudo_negatives(ova: Tensor, negative: Tensor) -> Tensor:
    """−Σ_k log φ^unknown_k over the classes marked as surely not those of the sample, [n] (SSB)."""
    return (-F.log_softmax(ova, dim=1)[:, 0] * negative).sum(dim=1)


def pseudo_positives(ova: Tensor, positive: Tensor) -> Tensor:
    """−Σ_k log φ^known_k over the classes marked as surely those of the sample, [n] (FedOpenMatch)."""
    return (-F.log_softmax(ova, dim=1)[:, 1] * positive).sum(dim=1)


def prior_adjusted(ova: Tensor, strength: float) -> Tensor:
    """One-vs-all logits plus strength · log of the priors (K − 1)/K of unknown and 1/K of known (FedOpenMatch).

    Trained so, the logits themselves lean less to unknown. A single class has no negatives and stays as it is.
    """
    classes = ova.shape[2]
    prior = torch.tensor([max(classes - 1, 1) / classes, 1 / classes], dtype=ova.dtype, device=ova.device)
    return ova + strength * prior.log()[:, None]


def logit_consistency(logits: Tensor, other: Tensor) -> Tensor:
    """Mean squared difference of the raw outputs on two views, [n]; gradients reach both (FedOpenMatch)."""
    return ((logits - other) ** 2).flatten(1).mean(dim=1)


def alignment(projected: Tensor, pivots: Tensor, label: Tensor, gated: Tensor, temperature: float) -> Tensor:
    """OpenFL's eq. (1): gated samples approach the pivot of their label, all others leave all pivots, [n]."""
    similarity = F.normalize(projected, dim=1) @ F.normalize(pivots, dim=1).T / temperature
    return similarity.logsumexp(dim=1) - gated * _own_class(similarity, label)


def supervised_contrastive(projected: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """−mean over samples of the same class of log p(that sample | all others), [n]; 0 for the only one of its class."""
    unit = F.normalize(projected, dim=1)
    itself = torch.eye(len(unit), dtype=torch.bool, device=unit.device)
    similarity = (unit @ unit.T / temperature).masked_fill(itself, -torch.inf)
    same = (labels[:, None] == labels) & ~itself
    log_p = (similarity - similarity.logsumexp(dim=1, keepdim=True)).masked_fill(~same, 0.0)
    return -log_p.sum(dim=1) / same.sum(dim=1).clamp(min=1)


def prior_divergence(mean: Tensor, prior: Tensor, kind: str) -> Tensor:
    """How far a batch's mean prediction is from a prior, both [classes]: KL(mean‖prior), KL(prior‖mean) or JSD.

    With a uniform prior "kl" is log K − H(mean), SimGCD's mean-entropy term. JSD is at most log 2.
    """
    mean = mean.clamp_min(torch.finfo(mean.dtype).tiny)  # at 0 the slope of x log x is infinite

    def kl(one: Tensor, other: Tensor) -> Tensor:
        return (torch.xlogy(one, one) - torch.xlogy(one, other)).sum()

    match kind:
        case "kl":
            return kl(mean, prior)
        case "kl_fwd":
            return kl(prior, mean)
        case _:
            middle = (mean + prior) / 2
            return (kl(mean, middle) + kl(prior, middle)) / 2


def cosine_distance(vectors: Tensor, target: Tensor) -> Tensor:
    """1 − cos of each vector with its target, [n] (DoubleMatch's loss on features, of both views of an image)."""
    return 1 - F.cosine_similarity(vectors, target, dim=1)


def subspace_separation(score: Tensor, known: Tensor) -> Tensor:
    """(1 − 2M) u, [n]: images drawn as known (M = 1) move into the subspace, the others out of it (ProSub)."""
    return (1 - 2 * known.to(score.dtype)) * score


def _own_class(values: Tensor, labels: Tensor) -> Tensor:
    return values.gather(1, labels[:, None])[:, 0]

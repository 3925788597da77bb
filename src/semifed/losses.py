"""The terms of the objectives, once each: per-sample values; the caller masks, weights and reduces."""

from collections.abc import Mapping

from torch import Tensor
from torch.nn import functional as F

from semifed.wire import Weights


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """−log p(label) for each sample, [n]."""
    return F.cross_entropy(logits, labels, reduction="none")


def soft_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """−Σ_c target_c log p_c for each sample, [n]; equals KL(target‖p) up to the target's entropy."""
    return -(target * F.log_softmax(logits, dim=1)).sum(dim=1)


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

"""Objectives that several methods share, composed of the formulas in `losses`."""

import torch
from torch import Tensor

from semifed.data.client import Batch
from semifed.fit import Loss
from semifed.losses import cross_entropy, masked_mean, mean
from semifed.models.network import Output
from semifed.net import Net
from semifed.pseudo import PseudoLabels


def supervised(net: Net, batch: Batch) -> Loss:
    """Cross entropy on the weak views of the labelled images; 0 where there are none."""
    if len(batch.labelled) == 0:
        return Loss(torch.zeros(()), {})
    value = mean(cross_entropy(net(batch.labelled.weak).logits, batch.labelled.labels))
    return Loss(value, {"supervised": value})


def semi_supervised(
    batch: Batch, labelled: Output, strong: Output, label: Tensor, used: Tensor, unlabelled_weight: float
) -> Loss:
    """FixMatch's objective: cross entropy on the labels plus that of strong views on the pseudo-labels in use."""
    supervised_term = mean(cross_entropy(labelled.logits, batch.labelled.labels))
    consistency = masked_mean(cross_entropy(strong.logits, label), used)
    value = supervised_term + unlabelled_weight * consistency
    if len(batch.labelled) == 0 and not used.any():
        value = value.detach()  # nothing to learn from: weight decay and momentum alone must not move the model
    return Loss(
        value,
        {"supervised": supervised_term, "consistency": consistency},
        pseudo=PseudoLabels(batch.unlabelled.position, label, used),
    )


def plus(loss: Loss, name: str, weight: float, term: Tensor) -> Loss:
    """The loss with one more weighted and named term; alone, such a term is nothing to learn from."""
    if not loss.value.requires_grad:
        return loss
    return loss._replace(value=loss.value + weight * term, terms={**loss.terms, name: term})

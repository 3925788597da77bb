"""What a model says of any number of images: a batch at a time, and the same batches whoever computes them."""

from collections.abc import Callable

import torch
from torch import Tensor

from semifed.methods import AnyMethod
from semifed.net import Net
from semifed.payloads import Prediction

BATCH = 128  # keeps what small networks compute in the cache; 1024 took twice as long


@torch.no_grad()
def predictions(method: AnyMethod, net: Net, images: Tensor, view: Callable[[Tensor], Tensor]) -> Prediction:
    """The method's prediction of one view of each image."""
    return joined([method.predict(net, view(part)) for part in images.split(BATCH)])


def joined(parts: list[Prediction]) -> Prediction:
    """Predictions of some images and of others, one after the other."""
    return Prediction(*(torch.cat(values) for values in zip(*parts, strict=True)))

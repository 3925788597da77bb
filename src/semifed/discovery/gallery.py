"""Images to be grouped, as a model sees them."""

from typing import NamedTuple

from torch import Tensor

from semifed.models.network import Output


class Gallery(NamedTuple):
    """What a model says of images to be grouped, and of labelled ones nobody trained on."""

    images: Output
    labelled: Output
    labels: Tensor  # of the latter, known classes
    seed: int

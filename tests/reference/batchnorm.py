"""Batch-norm statistics of the three-block CNN, by hand: one pass of all images as a single batch."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]


def convolved(images: Array, kernel: Array) -> Array:
    """3x3 convolution with one pixel of zeros around, no bias."""
    count, _, height, width = images.shape
    padded = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)))
    result = np.zeros((count, len(kernel), height, width))
    for row in range(3):
        for column in range(3):
            window = padded[:, :, row : row + height, column : column + width]
            result += np.einsum("nchw,oc->nohw", window, kernel[:, :, row, column])
    return result


def halved(maps: Array) -> Array:
    """The maximum of each 2x2 square; a side of one pixel stays."""
    count, channels, height, width = maps.shape
    tall, wide = min(2, height), min(2, width)
    maps = maps[:, :, : height // tall * tall, : width // wide * wide]
    squares: Array = maps.reshape(count, channels, height // tall, tall, width // wide, wide)
    return np.asarray(squares.max(axis=(3, 5)))


def cnn_statistics(weights: Mapping[str, Tensor], images: Array) -> dict[str, Array]:
    """Mean and unbiased variance of each norm's input, the norms before it using the batch's own moments."""
    numbers = {name: tensor.numpy().astype(np.float64) for name, tensor in weights.items()}
    statistics = {}
    maps = images
    for block in range(3):
        maps = convolved(maps, numbers[f"backbone.convs.{block}.weight"])
        per_channel = np.moveaxis(maps, 1, 0).reshape(maps.shape[1], -1)
        mean, variance = per_channel.mean(axis=1), per_channel.var(axis=1)
        norm = f"backbone.norms.{block}"
        statistics[f"{norm}.running_mean"] = mean
        statistics[f"{norm}.running_var"] = per_channel.var(axis=1, ddof=1)
        scale = numbers[f"{norm}.weight"] / np.sqrt(variance + 1e-5)
        maps = (maps - mean[:, None, None]) * scale[:, None, None] + numbers[f"{norm}.bias"][:, None, None]
        maps = halved(np.maximum(maps, 0))
    return statistics

"""Images side by side in one PNG: what did a group turn out to be?"""

from io import BytesIO

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

SMALLEST_SIDE = 40  # pixels on the page; smaller images are enlarged by whole factors, so that pixels stay pixels
LARGEST_SIDE = 64  # larger images are reduced: the strips of many groups are part of one page
GAP = 2
GREY = 128  # between images, quiet on light paper and on dark


def strip(images: Tensor) -> bytes:
    """A PNG of images uint8 [n, c, h, w] in one row."""
    if images.shape[2] > LARGEST_SIDE:
        width = max(1, round(images.shape[3] * LARGEST_SIDE / images.shape[2]))
        images = F.interpolate(images.float(), (LARGEST_SIDE, width), mode="area").round().to(torch.uint8)
    count, channels, height, width = images.shape
    factor = max(1, -(-SMALLEST_SIDE // height))
    tiles = images.repeat_interleave(factor, dim=2).repeat_interleave(factor, dim=3).permute(0, 2, 3, 1).numpy()
    row = np.full((height * factor, count * (width * factor + GAP) - GAP, channels), GREY, np.uint8)
    for number, tile in enumerate(tiles):
        start = number * (width * factor + GAP)
        row[:, start : start + width * factor] = tile
    written = BytesIO()
    Image.fromarray(row[:, :, 0] if channels == 1 else row).save(written, "PNG")
    return written.getvalue()

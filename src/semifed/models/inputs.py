"""Images in the form a pretrained network was trained on: its size, three channels, its own normalisation."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from semifed.errors import UserError
from semifed.models.backbones import Normalisation, Setting

IMAGENET = Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
ONE_HALF = Normalisation((127 / 255,) * 3, (128 / 255,) * 3)  # pixels from -1 to 1, as TensorFlow's small networks want


class InputForm(NamedTuple):
    """Resizing, and the affine map a channel from one normalisation to another."""

    size: int
    scale: tuple[float, ...]
    shift: tuple[float, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """Images [n, 3, size, size] of normalised ones [n, 1 or 3, h, w]."""
        if x.shape[2:] != (self.size, self.size):
            x = F.interpolate(x, (self.size, self.size), mode="bilinear", align_corners=False, antialias=True)
        scale, shift = (x.new_tensor(values)[:, None, None] for values in (self.scale, self.shift))
        return torch.addcmul(shift, x, scale).contiguous(memory_format=torch.channels_last)


def input_form(setting: Setting, wanted: Normalisation, size: int) -> InputForm:
    """How images of a setting become what a network wants; grey images are repeated in all three channels."""
    if setting.channels not in (1, 3):
        raise UserError(f"model.name: pretrained networks see 1 or 3 channels, these images have {setting.channels}")
    if setting.normalised is None:
        raise ValueError("a pretrained network must be told how the images are normalised")
    # ((x · std + mean) - wanted mean) / wanted std: the pixels that the views started from, normalised anew.
    mean, std = (tuple(values) * (3 // setting.channels) for values in setting.normalised)
    scale = tuple(ours / theirs for ours, theirs in zip(std, wanted.std, strict=True))
    shift = tuple((ours - theirs) / by for ours, theirs, by in zip(mean, *wanted, strict=True))
    return InputForm(size, scale, shift)

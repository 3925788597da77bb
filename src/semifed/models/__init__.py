"""Networks: backbones, heads, and batch norm for federated training."""

from semifed.models.batchnorm import BatchNorm, recalibrate, set_batchnorm
from semifed.models.network import MODELS, HeadSpec, Network, Output, build_network

__all__ = [
    "MODELS",
    "BatchNorm",
    "HeadSpec",
    "Network",
    "Output",
    "build_network",
    "recalibrate",
    "set_batchnorm",
]

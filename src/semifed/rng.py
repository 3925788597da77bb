"""Random streams named by what they are for, so that no result depends on who ran first.

A stream is addressed by (seed, round, client, purpose, ...): the same address gives the same numbers in any
process, for any number of workers and in any order of replies.
"""

from hashlib import blake2b

import numpy as np
import torch

Key = int | str


def stream_seed(*key: Key) -> int:
    """A 63-bit seed for one address; neighbouring addresses are unrelated.

    >>> stream_seed(0, 1, 2, "batches") == stream_seed(0, 1, 2, "batches")
    True
    >>> stream_seed(0, 12, "x") == stream_seed(0, 1, "2x")
    False
    """
    text = "/".join(f"{type(part).__name__}:{part}".replace("/", "//") for part in key)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def torch_stream(*key: Key) -> torch.Generator:
    """A fresh torch generator for one address."""
    return torch.Generator().manual_seed(stream_seed(*key))


def numpy_stream(*key: Key) -> np.random.Generator:
    """A fresh NumPy generator for one address."""
    return np.random.default_rng(stream_seed(*key))


def beta(concentration: float, generator: torch.Generator) -> float:
    """One number of Beta(concentration, concentration), drawn from the given stream."""
    seed = int(torch.randint(2**63 - 1, (), generator=generator))
    return float(np.random.default_rng(seed).beta(concentration, concentration))

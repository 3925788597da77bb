"""How many images a second are augmented, beside Pillow image by image and kornia batch by batch."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from semifed.bench.measuring import Cell, Table, ratio, spread, take_turns
from semifed.bench.pillow_views import PillowViews
from semifed.bench.workload import FIXMATCH_CNN, FIXMATCH_RESNET, Workload
from semifed.data.randaugment import RandAugment
from semifed.data.views import Crop, Cutout, Flip, Step, Views

IMAGES = 1024  # of one measurement
BATCHES = (32, 256)
NOT_INSTALLED = "not installed: pip install kornia"

Augment = Callable[[Tensor], Tensor]  # uint8 [n, c, h, w] to normalised float32


def view_speed(
    folder: Path,
    turns: int,
    workloads: Sequence[Workload] = (FIXMATCH_CNN, FIXMATCH_RESNET),
    batches: Sequence[int] = BATCHES,
    images: int = IMAGES,
) -> list[Table]:
    """Images a second of weak and strong views in the batches that training draws."""
    torch.set_num_threads(1)
    rows: list[Sequence[Cell]] = []
    measured = []
    for workload in workloads:
        scenario = workload.parts(folder).scenario
        channels, height, width = workload.shape
        for strength in ("weak", "strong"):
            for batch in batches:
                chosen = scenario.dataset.x_train[:images]
                augments = contestants(scenario.views, strength, (height, width))
                seconds = take_turns(
                    {name: _timed(augment, chosen, batch) for name, augment in augments.items()}, turns
                )
                speed = {name: spread([len(chosen) / one for one in took]).median for name, took in seconds.items()}
                gain = {name: ratio(took, seconds["semifed"]) for name, took in seconds.items() if name != "semifed"}
                rows.append(
                    (
                        f"{width}x{height}x{channels}",
                        strength,
                        batch,
                        round(speed["semifed"]),
                        round(speed["Pillow"]),
                        gain["Pillow"].shown(1),
                        round(speed["kornia"]) if "kornia" in speed else NOT_INSTALLED,
                        gain["kornia"].shown(1) if "kornia" in gain else None,
                    )
                )
                measured.append(
                    {
                        "shape": [channels, height, width],
                        "view": strength,
                        "batch": batch,
                        "images": len(chosen),
                        "seconds": seconds,
                    }
                )
    header = ("image", "view", "batch", "images/s", "Pillow", "times Pillow's", "kornia", "times kornia's")
    return [
        Table(
            "views",
            "Augmentation",
            "From uint8 images to normalised float32 batches on one core: mirror and crop (weak), then RandAugment"
            " of FixMatch and cutout (strong).",
            header,
            rows,
            {"views": measured},
            ("kornia draws two operations for the whole batch; here and with Pillow every image has its own.",),
        )
    ]


def contestants(views: Views, strength: str, size: tuple[int, int]) -> dict[str, Augment]:
    """Everybody who can make weak or strong views of a batch on this machine."""
    generator = torch.Generator().manual_seed(0)
    batched = views.weak if strength == "weak" else views.strong
    pillow = PillowViews(views)
    one = pillow.weak if strength == "weak" else pillow.strong
    found: dict[str, Augment] = {
        "semifed": lambda images: batched(images, generator),
        "Pillow": lambda images: torch.stack([one(image) for image in images]),
    }
    with suppress(ImportError):
        found["kornia"] = _kornia_views(views, views.weak_steps if strength == "weak" else views.strong_steps, size)
    return found


def _timed(augment: Augment, images: Tensor, batch: int) -> Callable[[], float]:
    augment(images[:batch])  # tables that are computed once belong to no turn

    def seconds() -> float:
        started = perf_counter()
        for part in images.split(batch):
            augment(part)
        return perf_counter() - started

    return seconds


def _kornia_views(views: Views, steps: Sequence[Step], size: tuple[int, int]) -> Augment:
    """kornia's nearest counterpart of each step, on batches of floats."""
    kornia: Any = import_module("kornia.augmentation")
    auto: Any = import_module("kornia.augmentation.auto.rand_augment.rand_augment")
    grey = len(views.mean) == 1
    pool = [operation for operation in auto.default_policy if not (grey and operation[0][0] == "color")]
    made: list[Any] = []
    for step in steps:
        match step:
            case Flip():
                made.append(kornia.RandomHorizontalFlip(p=0.5))
            case Crop(pixels):
                made.append(kornia.RandomCrop(size, padding=pixels, padding_mode="reflect"))
            case RandAugment(count, magnitude):
                made.append(auto.RandAugment(n=count, m=magnitude, policy=pool))
            case Cutout(side):
                area = min(1.0, side * side / (size[0] * size[1]))
                made.append(kornia.RandomErasing(scale=(area, area), ratio=(1.0, 1.0), value=views.fill / 255, p=1.0))
    made.append(kornia.Normalize(mean=list(views.mean), std=list(views.std)))
    chain: Any = torch.nn.Sequential(*made)

    def augmented(images: Tensor) -> Tensor:
        with torch.no_grad():
            result: Tensor = chain(images.float().div(255))
        return result

    return augmented

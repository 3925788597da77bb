"""What is in a pile of images? Groups found by a delivered model, whether their classes have names or not."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from semifed.durable import write_atomically
from semifed.predict import Member, Model, Seen
from semifed.predictions import BATCH
from semifed.report.contact_sheet import strip

SHOWN = 16


class Group(NamedTuple):
    """Images that belong together."""

    number: int
    images: int
    looks_like: str  # the known class most of them look most like
    share: float  # of them that do
    confidence: float  # mean over its images: low for a class that has no name


def discovered(model: Model, seen: Seen, sheets: Path | None = None) -> list[Member]:
    """Every image with its group; with `sheets`, pictures of the groups are written there."""
    images, paths = seen.images, seen.paths
    found = model.groups(images).tolist()
    sizes = Counter(group for group in found if group >= 0)
    rank = {group: number for number, (group, _) in enumerate(sizes.most_common())}
    said = [answer for some in images.split(BATCH) for answer in model.said_of(some)]
    members = [
        Member(path, rank.get(group, -1), label, confidence)
        for path, group, (label, confidence, _) in zip(paths, found, said, strict=True)
    ]
    if sheets is not None:
        sheets.mkdir(parents=True, exist_ok=True)
        for number in range(len(rank)):
            own = [index for index, member in enumerate(members) if member.group == number][:SHOWN]
            write_atomically(sheets / f"group-{number:03}.png", strip(images[own]))
    return members


def described(members: Sequence[Member]) -> list[Group]:
    """The groups, the largest first."""
    numbers = sorted({member.group for member in members if member.group >= 0})
    groups = []
    for number in numbers:
        own = [member for member in members if member.group == number]
        looks_like, times = Counter(member.label for member in own).most_common(1)[0]
        mean = sum(member.confidence for member in own) / len(own)
        groups.append(Group(number, len(own), looks_like, times / len(own), mean))
    return groups

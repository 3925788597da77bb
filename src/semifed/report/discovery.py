"""What a run discovered: its groups as pictures, and how they fit known and novel classes."""

import math
from base64 import b64encode
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from semifed.report.charts import round_chart, three_digits
from semifed.report.figures import Chart, Cloud, cloud_legend, flat_map
from semifed.report.openset import SmallTable, image_words, map_note, pair_of, score_histogram
from semifed.report.rundir_reader import Run, finite, listed, read_strip
from semifed.report.words import beside_words, count, metric_title, metric_value

Counts = npt.NDArray[np.int64]  # [groups, classes], images of each class in each group

CONCEPTS = "concepts"  # key among the terms of the loss, though it is none
_GROUPS_SHOWN = 30
_OTHERS_NAMED = 3
_CLASSES_IN_MATRIX = 20
_CONFUSIONS_SHOWN = 20
_MOST_IMAGES = 10**12  # of a class in a group; more is damage, and would overflow sums
_COLOURED = 7  # the eighth colour is the grey of all other groups
_BESIDE = ("infomap", "plus", "kmeans")
_COMPARED = ("all", "old", "new", "clusters")


class Found(NamedTuple):
    """Groups from the largest, the classes in them, and the class each group stands for."""

    names: Sequence[str]
    known: int  # the classes that come first
    counts: Counts
    matched: Sequence[int | None]


class GroupRow(NamedTuple):
    """A group of the contact sheet."""

    name: str  # of the class it stands for; empty if it stands for none
    kind: str  # known or novel
    size: str
    purity: str
    strip: str  # data URI, empty if there is no picture
    spoken: str


class Heat(NamedTuple):
    """A cell of the matrix: a share of the images of a class."""

    text: str
    share: float
    own: bool  # in the group that stands for the class


class HeatRow(NamedTuple):
    """A class and where its images are."""

    name: str
    novel: bool
    images: str
    cells: Sequence[Heat]


class Matrix(NamedTuple):
    """Classes against the groups that stand for them."""

    columns: Sequence[str]
    first_novel: int  # column
    rows: Sequence[HeatRow]


class Discovery(NamedTuple):
    """The section of a report; what a run does not tell is empty."""

    damaged: str
    groups: Sequence[GroupRow]
    further: str
    matrix: Matrix | None
    confusions: SmallTable | None
    charts: Sequence[Chart]
    beside: SmallTable | None


def discovery_section(run: Run) -> Discovery | None:
    """Everything the page shows of discovered groups; None if the run looked for none."""
    if not (run.discovers or run.discovery or run.damaged):
        return None
    found = found_groups(run.discovery)
    damaged = run.damaged
    if run.discovery and found is None:
        damaged = "discovery.json: expected names of classes, and groups with a number of images for each class"
    fits = found is not None and len(found.names) <= _CLASSES_IN_MATRIX
    charts = [_confidence_chart(run.discovery), _concept_chart(run), _group_map(run.discovery)]
    return Discovery(
        damaged,
        [] if found is None else _contact_sheet(run, found),
        "" if found is None else _further_words(found),
        _matrix(found) if found is not None and fits else None,
        _confusions(found) if found is not None and not fits else None,
        [chart for chart in charts if chart is not None],
        _beside_table(run),
    )


def true_classes(run: Run) -> int | None:
    """How many classes the images were of, None if nobody wrote it down."""
    found = found_groups(run.discovery)
    if found is not None:
        return int(np.count_nonzero(found.counts.sum(axis=0)))
    return len(listed(run.partition, "classes")) or None


def matched_classes(counts: Counts) -> list[int | None]:
    """The class of each group in the one-to-one match with most images in the right place; None for groups left over.

    A group that shares no image with the class it is left with stands for nothing.
    """
    from scipy.optimize import linear_sum_assignment

    matched: list[int | None] = [None] * len(counts)
    for group, label in zip(*linear_sum_assignment(counts, maximize=True), strict=True):
        if counts[group, label]:
            matched[group] = int(label)
    return matched


def found_groups(discovery: Mapping[str, Any]) -> Found | None:
    """The groups of `discovery.json`; None if there are none, or if a number is missing."""
    names = [str(name) for name in listed(discovery, "classes")]
    known = finite(discovery.get("known"))
    groups = [_class_counts(group, len(names)) for group in listed(discovery, "groups")]
    whole = [group for group in groups if group is not None]
    if known is None or not whole or len(whole) < len(groups):
        return None
    counts = np.array(whole, np.int64)
    return Found(names, int(known), counts, matched_classes(counts))


def _class_counts(group: object, classes: int) -> list[int] | None:
    stored = listed(group, "counts") if isinstance(group, Mapping) else []
    counts = [int(number) for one in stored if (number := finite(one)) is not None and 0 <= number <= _MOST_IMAGES]
    return counts if len(counts) == len(stored) == classes and any(counts) else None


def _contact_sheet(run: Run, found: Found) -> list[GroupRow]:
    return [_group_row(run, found, group) for group in range(min(len(found.counts), _GROUPS_SHOWN))]


def _group_row(run: Run, found: Found, group: int) -> GroupRow:
    inside, label = found.counts[group], found.matched[group]
    size = int(inside.sum())
    ranked = [(found.names[other], int(inside[other])) for other in np.argsort(-inside, kind="stable") if inside[other]]
    largest, most = ranked[0]
    others = ", ".join(f"\u201c{name}\u201d ({count(number)})" for name, number in ranked[1 : 1 + _OTHERS_NAMED])
    more = len(ranked) - 1 - _OTHERS_NAMED
    beside = f"; also {others}" if others else ""
    beside += f" and {more} more class{'' if more == 1 else 'es'}" if more > 0 else ""
    strip = read_strip(run, group)
    stands_for = "no class" if label is None else f"class {found.names[label]}"
    return GroupRow(
        "" if label is None else found.names[label],
        "" if label is None else _kind(label, found.known),
        image_words(size),
        f"purity {_share_text(most / size)}, {'all' if most == size else 'mostly'} \u201c{largest}\u201d{beside}",
        "" if strip is None else f"data:image/png;base64,{b64encode(strip).decode('ascii')}",
        f"Images nearest the middle of group {group + 1}, which stands for {stands_for}",
    )


def _kind(label: int, known: int) -> str:
    return "known" if label < known else "novel"


def _share_text(share: float) -> str:
    """Percent without decimals that says 100 only of all and 0 only of nothing."""
    percent = 100 * share
    if 0 < percent < 1:
        return "<1 %"
    return f"{math.floor(percent + 0.5) if percent < 99 else math.floor(percent)} %"


def _further_words(found: Found) -> str:
    rest = found.counts[_GROUPS_SHOWN:]
    if not len(rest):
        return ""
    stand = sum(label is not None for label in found.matched[_GROUPS_SHOWN:])
    return (
        f"Not shown: {count(len(rest))} smaller groups with {image_words(int(rest.sum()))} together, "
        f"{count(stand)} of which stand{'s' if stand == 1 else ''} for a class."
    )


def _shares(found: Found) -> tuple[list[tuple[int, int]], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Matched (class, group) in the order of classes, and the shares of each class in these groups and elsewhere."""
    pairs = sorted((label, group) for group, label in enumerate(found.matched) if label is not None)
    of_class = np.maximum(found.counts.sum(axis=0), 1)[:, None]
    inside = found.counts[[group for _, group in pairs]].T
    left_over = [group for group, label in enumerate(found.matched) if label is None]
    return pairs, inside / of_class, found.counts[left_over].sum(axis=0)[:, None] / of_class


def _matrix(found: Found) -> Matrix:
    pairs, inside, outside = _shares(found)
    present = found.counts.sum(axis=0)
    rows = [
        HeatRow(
            name,
            label >= found.known,
            count(int(present[label])),
            [
                *(_heat(inside[label, place], own == label) for place, (own, _) in enumerate(pairs)),
                _heat(outside[label, 0], own=False),
            ],
        )
        for label, name in enumerate(found.names)
    ]
    first_novel = sum(label < found.known for label, _ in pairs)
    return Matrix([found.names[label] for label, _ in pairs], first_novel, rows)


def _heat(share: float, own: bool) -> Heat:
    return Heat(_share_text(share).removesuffix(" %") if share else "", float(share), own)


def _confusions(found: Found) -> SmallTable:
    """The largest entries off the diagonal, where a matrix of all classes would be too large to read."""
    pairs, inside, outside = _shares(found)
    everywhere = np.hstack([inside, outside])
    for place, (label, _) in enumerate(pairs):
        everywhere[label, place] = 0.0
    largest = np.argsort(-everywhere, axis=None, kind="stable")[:_CONFUSIONS_SHOWN]
    places = [divmod(int(flat), everywhere.shape[1]) for flat in largest]
    where = [*(f"the group of {found.names[label]}" for label, _ in pairs), "groups without a class"]
    rows = [
        (found.names[label], (where[place], _share_text(everywhere[label, place])))
        for label, place in places
        if everywhere[label, place] > 0
    ]
    return SmallTable(("Its images are in", "Share of its images"), rows, "The largest confusions of classes")


def _confidence_chart(discovery: Mapping[str, Any]) -> Chart | None:
    confidence = discovery.get("confidence")
    told: Mapping[str, Any] = confidence if isinstance(confidence, Mapping) else {}
    counts = told.get("counts")
    names = {
        "taught": "the clients' labelled images, trained on",
        "labelled": "the server's labelled images, not trained on",
        "known": "grouped images, known classes",
        "novel": "grouped images, novel classes",
    }
    return score_histogram(
        listed(told, "bins"),
        {words: listed(counts if isinstance(counts, Mapping) else {}, key) for key, words in names.items()},
        "Confidence of the classifier of known classes",
        "highest probability",
    )


def _group_map(discovery: Mapping[str, Any]) -> Chart | None:
    drawn = discovery.get("map")
    told: Mapping[str, Any] = drawn if isinstance(drawn, Mapping) else {}
    names, known = [str(name) for name in listed(discovery, "classes")], finite(discovery.get("known")) or 0
    placed = [
        (point, group, label)
        for value, group, label in zip(*(listed(told, key) for key in ("points", "group", "class")), strict=False)
        if (point := pair_of(value)) and isinstance(group, int) and isinstance(label, int) and 0 <= label < len(names)
    ]
    if not placed:
        return None
    sizes = Counter(group for _, group, _ in placed if group >= 0)
    coloured = [group for group, _ in sorted(sizes.items(), key=lambda item: (-item[1], item[0]))[:_COLOURED]]
    clouds, entries = [], []
    for position, group in enumerate(coloured):
        labels = Counter(label for _, own, label in placed if own == group)
        mostly = min(labels, key=lambda label: (-labels[label], label))
        cloud = Cloud(f"mostly {names[mostly]}", (), f"series-{position + 1}", _mark(mostly, known))
        entries.append(cloud_legend(cloud, image_words(sizes[group])))
        clouds += _by_kind(cloud, [(point, label) for point, own, label in placed if own == group], known)
    others = [(point, label) for point, group, label in placed if group not in coloured]
    grey = Cloud("other groups", (), f"series-{_COLOURED + 1}", "square")
    if others:
        entries.append(cloud_legend(grey, image_words(len(others))))
    for mark, words in (("dot", "of a known class"), ("triangle", "of a novel class")):
        entries.append(cloud_legend(Cloud(words, (), "ink", mark), ""))
    described = ", ".join(f"{entry.name} ({entry.value})" for entry in entries if entry.value)
    return Chart(
        "Map of the groups",
        f"{map_note(told)}; a colour for each of the largest groups",
        # The grey ones first: they must not hide the groups.
        Markup(flat_map([*_by_kind(grey, others, known), *clouds], (), f"Map of features by group: {described}.")),
        entries,
    )


def _mark(label: int, known: float) -> str:
    return "dot" if label < known else "triangle"


def _by_kind(cloud: Cloud, members: Sequence[tuple[tuple[float, float], int]], known: float) -> list[Cloud]:
    marks = dict.fromkeys(_mark(label, known) for _, label in members)
    return [
        cloud._replace(points=[point for point, label in members if _mark(label, known) == mark], mark=mark)
        for mark in marks
    ]


def _concept_chart(run: Run) -> Chart | None:
    rounds = [line for line in run.rounds if line.loss.get(CONCEPTS) is not None]
    if not rounds:
        return None
    held = _classes_at_a_client(run.partition)
    beside = "" if held is None else f"; a client holds images of {held:.1f} classes, on average over all clients"
    return round_chart(
        "Concepts a client finds",
        f"groups among its own images, mean over the clients of a round{beside}",
        [("concepts", CONCEPTS)],
        rounds,
        lambda line, key: line.loss.get(key),
        percent=False,
        show=three_digits,
        room_for=(0.0,) if held is None else (0.0, held),
    )


def _classes_at_a_client(partition: Mapping[str, Any]) -> float | None:
    try:
        held = [
            np.add(labelled, unlabelled)
            for labelled, unlabelled in zip(listed(partition, "labelled"), listed(partition, "unlabelled"), strict=True)
        ]
        return float(np.mean([np.count_nonzero(own) for own in held])) if held else None
    except (TypeError, ValueError):  # the section on the partition says what is wrong with it
        return None


def _beside_table(run: Run) -> SmallTable | None:
    present = [prefix for prefix in _BESIDE if f"{prefix}.all" in run.metrics]
    if not present:
        return None
    rows = []
    for prefix in ("", *present):
        keys = [f"{prefix}.{metric}" if prefix else metric for metric in _COMPARED]
        words = beside_words(prefix) if prefix else "the method's own groups"
        rows.append((words, [metric_value(key, run.metrics.get(key)) for key in keys]))
    return SmallTable(
        [metric_title(metric) for metric in _COMPARED],
        rows,
        "Groups by other means in the same features after the last round: accuracy in percent, and their number",
    )

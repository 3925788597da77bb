"""What the report says of discovered groups: the match, the pictures, and what it does with damaged files."""

import base64
import io
import json
import re
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image

from semifed.metrics import hungarian_accuracy
from semifed.report import words
from semifed.report.compare import compare_runs
from semifed.report.contact_sheet import GAP, LARGEST_SIDE, strip
from semifed.report.discovery import Discovery, discovery_section, matched_classes, true_classes
from semifed.report.openset import gate_chart
from semifed.report.page import _curves, _key_figures
from semifed.report.rundir_reader import Run, read_run
from test_report import Page, page_of, partition, recipe, round_line, summary, write_run

SCRIPT = "<script>alert('1')</script>"
OWL = 'owl" <i>'
NAMES = ["cat", "dog", OWL, SCRIPT]  # cat and dog are known
# Each group by itself would stand for cat, dog, cat, owl; one to one, the third has to go without.
COUNTS = [[60, 0, 40, 0], [0, 50, 0, 10], [30, 0, 5, 0], [0, 0, 20, 2]]
METRICS = {
    "accuracy": 0.9,
    "auroc_seen": 0.8,
    "all": 0.599,
    "old": 0.786,
    "new": 0.26,
    "all_balanced": 0.5,
    "old_balanced": 0.8,
    "new_balanced": 0.2,
    "clusters": 4.0,
    "nmi": 0.61,
    "ari": 0.62,
    **{f"{prefix}.{metric}": 0.31 for prefix in ("infomap", "kmeans", "plus") for metric in ("all", "old", "new")},
    **{f"{prefix}.clusters": 13.0 for prefix in ("infomap", "kmeans", "plus")},
}


def discovery(**changes: Any) -> dict[str, Any]:
    return {
        "classes": NAMES,
        "known": 2,
        "groups": [{"size": sum(own), "counts": own, "images": [0, 1]} for own in COUNTS],
        "confidence": {
            "bins": [0.0, 0.5, 1.0],
            "counts": {"labelled": [1, 9], "known": [2, 8], "novel": [7, 3]},
        },
        "map": {
            "points": [[0.1, 0.2], [0.3, 0.1], [-0.2, 0.1], [0.5, 0.5]],
            "group": [5, 5, 2, -1],
            "class": [0, 2, 3, 1],
            "explained": [0.3, 0.2],
        },
        **changes,
    }


def write_strips(run: Path, many: int) -> None:
    (run / "groups").mkdir()
    for group in range(many):
        (run / "groups" / f"{group:02}.png").write_bytes(strip(torch.full((2, 1, 8, 8), group, dtype=torch.uint8)))


NO_PICTURES: dict[str, Any] = {"confidence": None, "map": None}


def discovery_run(path: Path, settings: dict[str, Any] | None = None, **changes: Any) -> Path:
    gate = {"pass_known": 0.5, "pass_unknown": 0.1, "purity": 0.9}
    rounds = [
        round_line(number, metrics=METRICS, loss={"total": 1.0, "concepts": 11.5} if number else {}, gate=gate)
        for number in range(4)
    ]
    told = summary(metrics=METRICS, metrics_last10=METRICS)
    found = discovery(**changes)
    run = write_run(path, settings, rounds, summary=told, partition=partition(), discovery=found)
    write_strips(run, len(found["groups"]))
    return run


def test_match_is_the_one_found_by_hand() -> None:
    assert matched_classes(np.array(COUNTS)) == [0, 1, None, 2]


@given(arrays(np.int64, st.tuples(st.integers(1, 4), st.integers(1, 4)), elements=st.integers(0, 20)))
def test_no_other_match_has_more_images_in_place(counts: np.ndarray) -> None:
    matched = matched_classes(counts)
    taken = [label for label in matched if label is not None]
    assert len(taken) == len(set(taken))
    side = max(counts.shape)
    padded = np.zeros((side, side), np.int64)
    padded[: counts.shape[0], : counts.shape[1]] = counts
    best = max(sum(padded[group, label] for group, label in enumerate(order)) for order in permutations(range(side)))
    inside = [counts[group, label] for group, label in enumerate(matched) if label is not None]
    assert sum(inside) == best
    assert all(inside)  # none stands for a class it has no image of


def test_match_agrees_with_the_metrics() -> None:
    counts = np.array(COUNTS)
    groups, classes = np.nonzero(counts)
    member = np.repeat(groups, counts[groups, classes])
    truth = np.repeat(classes, counts[groups, classes])
    in_place = [counts[group, label] for group, label in enumerate(matched_classes(counts)) if label is not None]
    assert hungarian_accuracy(member, truth, 2).all == sum(in_place) / counts.sum()


def test_contact_sheet_says_what_each_group_is(tmp_path: Path) -> None:
    section = section_of(read_run(discovery_run(tmp_path / "run")))
    assert [(row.name, row.kind) for row in section.groups] == [
        ("cat", "known"),
        ("dog", "known"),
        ("", ""),
        (OWL, "novel"),
    ]
    assert [row.size for row in section.groups] == ["100 images", "60 images", "35 images", "22 images"]
    assert [re.findall(r"\d+ %", row.purity)[0] for row in section.groups] == ["60 %", "83 %", "86 %", "91 %"]
    assert section.groups[0].purity.endswith(f"mostly “cat”; also “{OWL}” (40)")
    stored = [base64.b64decode(row.strip.removeprefix("data:image/png;base64,")) for row in section.groups]
    assert stored == [(tmp_path / "run" / "groups" / f"{group:02}.png").read_bytes() for group in range(4)]


def told_run(names: list[str], groups: list[list[int]]) -> Run:
    return Run(
        Path("nowhere"), {}, discovery={"classes": names, "known": 1, "groups": [{"counts": own} for own in groups]}
    )


def section_of(run: Run) -> Discovery:
    section = discovery_section(run)
    assert section is not None
    return section


def test_a_group_named_after_its_smaller_part_says_so() -> None:
    row = section_of(told_run(["1", "8"], [[35, 66], [0, 58]])).groups[0]
    assert (row.name, row.strip) == ("1", "")
    assert "purity 65 %, mostly “8”; also “1” (35)" in row.purity


def test_matrix_has_the_shares_of_each_class(tmp_path: Path) -> None:
    section = section_of(read_run(discovery_run(tmp_path / "run")))
    assert section.matrix is not None
    assert section.matrix.columns == ["cat", "dog", OWL]
    assert section.matrix.first_novel == 2
    assert [row.novel for row in section.matrix.rows] == [False, False, True, True]
    shares = [[cell.share for cell in row.cells] for row in section.matrix.rows]
    assert shares[0] == pytest.approx([60 / 90, 0, 0, 30 / 90])
    assert shares[2] == pytest.approx([40 / 65, 0, 20 / 65, 5 / 65])
    assert shares[3] == pytest.approx([0, 10 / 12, 2 / 12, 0])
    assert [cell.own for cell in section.matrix.rows[2].cells] == [False, False, True, False]
    assert [cell.own for cell in section.matrix.rows[3].cells] == [False] * 4  # no group stands for it
    assert [cell.text for cell in section.matrix.rows[0].cells] == ["67", "", "", "33"]


@pytest.mark.parametrize(("part", "shown"), [(1, "<1"), (9, "<1"), (14, "1"), (15, "2"), (999, "99"), (1000, "100")])
def test_shares_round_to_all_or_nothing_only_where_it_is(part: int, shown: str) -> None:
    groups = [[part, 0], *([[1000 - part, 5000]] if part < 1000 else [])]
    matrix = section_of(told_run(["a", "b"], groups)).matrix
    assert matrix is not None
    assert matrix.rows[0].cells[0].text == shown


def test_many_groups_and_classes_are_summarised() -> None:
    counts = [[40 - group, *([0] * 24)] for group in range(35)]
    counts[34] = [0, 3, *([0] * 23)]
    section = section_of(told_run([f"c{label}" for label in range(25)], counts))
    assert len(section.groups) == 30
    hidden = sum(map(sum, counts[30:]))
    assert section.further.startswith(f"Not shown: 5 smaller groups with {hidden} images together, 1 of which stands ")
    assert section.matrix is None
    assert section.confusions is not None
    everything = sum(own[0] for own in counts)
    assert section.confusions.rows == [
        ("c0", ("groups without a class", f"{100 * (everything - 40) / everything:.0f} %"))
    ]


def test_page_shows_everything_and_escapes_it(tmp_path: Path) -> None:
    html, page = page_of(discovery_run(tmp_path / "run"))
    assert not {"script", "i"} & set(page.tags)
    assert SCRIPT in page.text
    for expected in (
        "What did it discover?",
        "no class: counted as wrong",
        "in groups without a class",
        "k-means was told the true number of classes",
        "grouped images, novel classes 10 images",
        "novel images identified by mistake, of all novel 10.0",
        "concepts 11.5",
        "two principal axes with 50 % of the variance",
        "with labelled images, FedLPA+ 31.0 31.0 31.0 13",
        "Groups found 4 for 4 true classes",
    ):
        assert expected in page.text
    assert "let through" not in page.text
    assert page.tags.count("img") == 4
    spoken = [value for name, value in page.attributes if name == "alt"]
    assert spoken[0] == "Images nearest the middle of group 1, which stands for class cat"
    assert spoken[2].endswith("no class")
    assert spoken[3].endswith(OWL)
    sources = [value for name, value in page.attributes if name == "src"]
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert re.search(r"https?://|//[a-z]+\.|@import|url\((?!#)", re.sub(r'src="[^"]*"', "", html)) is None


def test_map_colours_groups_and_marks_kinds(tmp_path: Path) -> None:
    section = section_of(read_run(discovery_run(tmp_path / "run")))
    entries = section.charts[-1].legend
    assert [(entry.name, entry.mark, entry.value) for entry in entries] == [
        ("mostly cat", "dot", "2 images"),
        (f"mostly {SCRIPT}", "triangle", "1 image"),
        ("other groups", "square", "1 image"),
        ("of a known class", "dot", ""),
        ("of a novel class", "triangle", ""),
    ]
    svg = str(section.charts[-1].svg)
    assert len(re.findall(r"<use ", svg)) == 4


def test_key_figures_and_curves_are_about_groups(tmp_path: Path) -> None:
    run = read_run(discovery_run(tmp_path / "run"))
    titles = [figure.title for figure in _key_figures(run)]
    assert titles[:5] == [
        "Accuracy, all classes",
        "Accuracy, all classes",
        "Accuracy, known classes",
        "Accuracy, novel classes",
        "Groups found",
    ]
    assert not any("AUROC" in title for title in titles)
    curves = {chart.title: [entry.name for entry in chart.legend] for chart in _curves(run)}
    assert curves["Accuracy of the groups"] == ["all classes", "known classes", "novel classes"]
    assert curves["Balanced accuracy of the groups"] == ["all classes", "known classes", "novel classes"]
    assert curves["Accuracy"] == ["Accuracy"]
    assert curves["Training loss"] == ["total"]
    chart = gate_chart(run)
    assert chart is not None
    assert chart.title == "Identified as of a known class"


@pytest.mark.parametrize(
    "content",
    [
        "[1,",
        "[]",
        json.dumps({"classes": NAMES}),
        json.dumps(discovery(**NO_PICTURES, groups=[{"counts": [1, 2]}])),
        json.dumps(discovery(**NO_PICTURES, groups=[{"counts": [1, 2, None, 3]}])),
        json.dumps(discovery(**NO_PICTURES, groups=[{"counts": [1, 2, -3, 3]}])),
        json.dumps(discovery(**NO_PICTURES, groups=[{"counts": [0, 0, 0, 0]}])),
        json.dumps(discovery(**NO_PICTURES, groups=[{"counts": [1e300, 0, 0, 0]}])),
        json.dumps(discovery(**NO_PICTURES, groups="many")),
        json.dumps(discovery(**NO_PICTURES, known="two")),
    ],
)
def test_damaged_file_costs_only_its_own_pictures(tmp_path: Path, content: str) -> None:
    path = discovery_run(tmp_path / "run", **NO_PICTURES)
    (path / "discovery.json").write_text(content, encoding="utf-8")
    run = read_run(path)
    section = section_of(run)
    assert section.damaged.startswith("discovery.json: ")
    assert (section.groups, section.matrix, section.confusions) == ([], None, None)
    assert section.beside is not None  # from the metrics
    assert true_classes(run) == 3  # from the partition


@pytest.mark.parametrize(
    "changes",
    [
        NO_PICTURES,
        {"confidence": {"bins": [0, 1], "counts": []}, "map": {"points": [[1, 2]], "group": ["a"], "class": [0]}},
        {"confidence": [], "map": {"points": [[1, None]], "group": [0], "class": [0]}},
        {"confidence": {"bins": 3}, "map": {"points": [[1, 2]], "group": [0], "class": [1.5]}},
        {"confidence": {"bins": [0, 1]}, "map": {"points": [[1, 2]], "group": [0], "class": [9]}},
    ],
)
def test_pictures_without_numbers_are_left_out(tmp_path: Path, changes: dict[str, Any]) -> None:
    section = section_of(read_run(discovery_run(tmp_path / "run", **changes)))
    assert [chart.title for chart in section.charts] == ["Concepts a client finds"]
    assert not section.damaged


@pytest.mark.parametrize("damage", ["missing", "empty", "half", "text", "directory"])
def test_damaged_strip_costs_only_itself(tmp_path: Path, damage: str) -> None:
    run = discovery_run(tmp_path / "run", **NO_PICTURES)
    picture = run / "groups" / "01.png"
    content = picture.read_bytes()
    picture.unlink()
    if damage == "directory":
        picture.mkdir()
    elif damage != "missing":
        picture.write_bytes({"empty": b"", "half": content[: len(content) // 2], "text": b"<svg/>"}[damage])
    assert [bool(row.strip) for row in section_of(read_run(run)).groups] == [True, False, True, True]


def test_page_survives_damage(tmp_path: Path) -> None:
    run = discovery_run(tmp_path / "run")
    (run / "groups" / "01.png").unlink()
    _, page = page_of(run)
    assert "no picture" in page.text
    assert page.tags.count("img") == 3
    (run / "discovery.json").write_text("[1,", encoding="utf-8")
    _, page = page_of(run)
    assert "Not all of it can be shown. discovery.json: not valid JSON" in page.text
    assert str(tmp_path) not in page.text
    assert "img" not in page.tags


def test_run_without_the_file_has_the_metrics(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", recipe(), [round_line(number, metrics=METRICS) for number in range(2)]))
    section = section_of(run)
    assert not section.damaged
    assert section.beside is not None
    assert ("Groups found", "4", "", "round 1") in _key_figures(run)


def test_other_runs_have_no_such_section(tmp_path: Path) -> None:
    assert discovery_section(read_run(write_run(tmp_path / "run"))) is None


def test_true_classes_are_those_with_images() -> None:
    assert true_classes(told_run(["a", "b", "c"], [[3, 0, 1]])) == 2
    assert true_classes(Run(Path("nowhere"), {})) is None


def test_metrics_have_names_meanings_and_an_order() -> None:
    plain = [metric for metric in METRICS if "." not in metric]
    assert all(words.metric_meaning(metric) for metric in plain)
    assert [metric for metric in METRICS if not words.is_fraction(metric)] == [
        "clusters",
        "infomap.clusters",
        "kmeans.clusters",
        "plus.clusters",
    ]
    ordered = words.in_reading_order(METRICS)
    assert ordered[:4] == ["all", "old", "new", "clusters"]
    assert ordered[-4:] == ["plus.all", "plus.old", "plus.new", "plus.clusters"]
    assert words.headline_metric(METRICS) == "all"
    assert words.headline_metric(["accuracy", "auroc_seen"]) == "accuracy"
    assert words.metric_title("kmeans.all") == "Accuracy, all classes (k-means told the true number of classes)"


def test_comparison_ranks_by_all(tmp_path: Path) -> None:
    first = discovery_run(tmp_path / "first")
    other = discovery_run(tmp_path / "other", recipe(method={"name": "fed-gcd"}))
    told = json.loads((other / "summary.json").read_text(encoding="utf-8"))
    told["metrics"] |= {"all": 0.7, "accuracy": 0.1}
    (other / "summary.json").write_text(json.dumps(told), encoding="utf-8")
    (other / "discovery.json").write_text("[1,", encoding="utf-8")  # of no use to a comparison
    compared = compare_runs([first, other])
    assert compared.headline == "all"
    assert [row.method for row in compared.rows] == ["fed-gcd", "openfl"]
    target = tmp_path / "compared.html"
    compared.write_html(target)
    text = Page(target.read_text(encoding="utf-8")).text
    assert "all last 10 vs first old new groups accuracy" in text


@pytest.mark.parametrize(("side", "shown"), [(8, 40), (28, 56), (64, 64), (224, LARGEST_SIDE)])
def test_strips_are_large_enough_to_see_and_small_enough_to_embed(side: int, shown: int) -> None:
    images = torch.arange(3, dtype=torch.uint8)[:, None, None, None].mul(100).expand(3, 3, side, side)
    with Image.open(io.BytesIO(strip(images))) as picture:
        assert picture.size == (3 * shown + 2 * GAP, shown)
        tiles = [np.asarray(picture)[:, place * (shown + GAP) :][:, :shown] for place in range(3)]
    assert [sorted(set(tile.ravel().tolist())) for tile in tiles] == [[0], [100], [200]]

"""`report.html` from run directories alone: whole, safe, self-contained, and honest about what is missing."""

import io
import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console
from scipy.stats import rankdata

from semifed.errors import UserError
from semifed.report import draw_partition, partition_table, words, write_report
from semifed.report.openset import (
    effective_clients,
    feature_map,
    gate_chart,
    other_models,
    score_table,
    steadiness,
    step_deviation,
    threshold_words,
    trust_charts,
    within_round_correlation,
)
from semifed.report.partition import _class_groups
from semifed.report.rundir_reader import Reliability, Run, find_runs, read_run
from semifed.report.svg import PALETTE

VOID = {"meta", "br", "hr", "img", "link", "input"}
NASTY = '<b>T&shirt</b> "$5$"'


class Page(HTMLParser):
    """Checks that tags balance while it collects text, tags and attributes."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == [], f"never closed: {self.open}"
        self.text = " ".join(self.text.split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data + " "


def recipe(**changes: Any) -> dict[str, Any]:
    return {
        "dataset": "fashion-mnist",
        "rounds": 3,
        "seed": 7,
        "clients_per_round": 2,
        "scenario": {
            "labels": "server",
            "classes": "open",
            "clients": 4,
            "partition": "dirichlet",
            "alpha": 0.3,
            "labelled_per_class": 40,
        },
        "method": {"name": "openfl", "threshold": 0.95},
        "engine": {"name": "local", "workers": 2},
        **changes,
    }


def round_line(number: int, **changes: Any) -> dict[str, Any]:
    trained = number > 0
    return {
        "round": number,
        "lr": 0.03,
        "clients": [0, 2] if trained else [],
        "failures": [],
        "loss": {"total": 1.5 / (number + 1), "supervised": 1 / (number + 1)} if trained else {},
        "metrics": {
            "accuracy": 0.5 + 0.1 * number,
            "auroc_seen": 0.9,
            "auroc_unseen.mnist": 0.95,
            "auroc_overall": 0.925,
        },
        "pseudo": {"seen": 1200, "used": 700, "accuracy": 0.93, "used_unknown": 40} if trained else {},
        "bytes_up": 1_500_000 * trained,
        "bytes_down": 2_000_000 * trained,
        "images": 900 * trained,
        "seconds": 2.0,
        **changes,
    }


def summary(**changes: Any) -> dict[str, Any]:
    return {
        "method": "openfl",
        "metrics": {"accuracy": 0.8, "auroc_seen": 0.9, "auroc_overall": 0.925},
        "metrics_last10": {"accuracy": 0.65, "auroc_seen": 0.9, "auroc_overall": 0.925},
        "best": {"round": 2, "metric": "accuracy", "value": 0.8765, "note": "best test round, not a result"},
        "per_class": [
            {"class": "Coat", "accuracy": 0.512, "count": 1000},
            {"class": NASTY, "accuracy": None, "count": 3},
        ],
        "bytes_up": 4_500_000,
        "bytes_down": 6_000_000,
        "seconds": 75.0,
        "images_per_second": 1234.5,
        "data_hash": "9f2c11b8",
        "versions": {"torch": "2.13.0"},
        "git_revision": None,
        "machine": "a <small> machine",
        "device": "cpu",
        "workers": 2,
        **changes,
    }


def partition(clients: int = 4, classes: int = 3, server: bool = True) -> dict[str, Any]:
    counts = np.random.default_rng(0).integers(0, 50, (clients, classes))
    return {
        "classes": [NASTY, *(f"class {number}" for number in range(1, classes))],
        "known": [number < max(1, 2 * classes // 3) for number in range(classes)],
        "labelled": (counts // 10).tolist(),
        "unlabelled": counts.tolist(),
        "server": [40] * classes if server else None,
    }


SCORES = {"bins": [0.0, 0.5, 1.0], "known": [90, 10], "sets": {"seen": [5, 45], "mnist": [0, 70]}}


def write_run(
    path: Path,
    settings: dict[str, Any] | None = None,
    rounds: list[dict[str, Any]] | None = None,
    **files: dict[str, Any],
) -> Path:
    path.mkdir(parents=True)
    (path / "recipe.toml").write_text(tomli_w.dumps(settings or recipe()), encoding="utf-8")
    lines = [round_line(number) for number in range(4)] if rounds is None else rounds
    (path / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return path


def whole_run(path: Path) -> Path:
    failed = round_line(3, failures=[{"client": 61, "reason": "sent <NaN>"}])
    rounds = [*(round_line(number) for number in range(3)), failed]
    return write_run(path, None, rounds, summary=summary(), partition=partition(), scores=SCORES)


def page_of(run: Path) -> tuple[str, Page]:
    html = write_report(run).read_text(encoding="utf-8")
    return html, Page(html)


def test_whole_run_says_what_was_measured(tmp_path: Path) -> None:
    target = write_report(whole_run(tmp_path / "run"))
    page = Page(target.read_text(encoding="utf-8"))
    assert target == tmp_path / "run" / "report.html"
    for words_expected in (
        "openfl on fashion-mnist",
        "Labels at the server, 40 per class; unknown classes at the clients, to be rejected; Dirichlet 0.3",
        "over 4 clients.",
        "3 rounds of 2 clients, seed 7",
        "Accuracy 80.0 % round 3",
        "Accuracy 65.0 % mean of last 3 tests",
        "AUROC, seen unknowns 90.0 %",
        "AUROC, overall 92.5 %",
        "4.50 MB 6.00 MB sent to them",
        "1 min 15 s 1,234 images a second",
        "not a result because the test images chose it: Accuracy 87.6 % after round 2",
        "used, of those seen 58.3",  # 700 / 1200
        "of unknown classes, of those used 5.7",  # 40 / 700
        "Coat 51.2",
        "known classes 100 images",
        "sent <NaN> 1 61 3",
        "Clients asked in all rounds: 7; failures: 1.",
        "threshold 0.95",
        "semifed run recipe.toml",
        "9f2c11b8",
        "2.13.0",
    ):
        assert words_expected in page.text
    assert "unfinished" not in page.text
    assert "Git revision" not in page.text
    assert page.tags.count("svg") == 3 + 2 + 1 + 1


def test_best_round_is_no_key_figure(tmp_path: Path) -> None:
    html, _ = page_of(whole_run(tmp_path / "run"))
    figures = re.search(r'<dl class="figures".*?</dl>', html, flags=re.DOTALL)
    assert figures is not None
    assert "87.6" not in figures.group()
    assert html.count("87.6") == 1


def test_names_are_escaped_everywhere(tmp_path: Path) -> None:
    script = "<script>alert('1')</script>"
    settings = recipe(
        dataset=script, method={"name": script, "field<": '"&'}, scenario={"labels": script, "partition": script}
    )
    losses = round_line(1, loss={script: 1.0}, metrics={script: 0.5, "auroc_unseen.<i>": 0.5})
    held = {**partition(), "classes": [script, NASTY, "</svg>"]}
    scores = {**SCORES, "sets": {script: [1, 2]}}
    files = {"summary": summary(versions={script: script}, data_hash=script), "partition": held, "scores": scores}
    html, page = page_of(write_run(tmp_path / script.replace("/", ""), settings, [losses], **files))
    assert "script" not in page.tags
    assert "i" not in page.tags
    assert "b" in page.tags  # the page's own, in legends: NASTY's would unbalance the count below
    assert html.count("<b>") == html.count("</b>") == len(re.findall(r" <b>[^<]*</b></li>", html))
    assert f"{script} on {script}" in page.text
    assert NASTY in page.text


def test_nothing_is_loaded_from_anywhere(tmp_path: Path) -> None:
    html, page = page_of(whole_run(tmp_path / "run"))
    assert not {"script", "link", "img", "iframe", "object", "base"} & set(page.tags)
    assert re.search(r"https?://|//[a-z]+\.|@import|url\((?!#)", html) is None
    assert all(value.startswith("#") for name, value in page.attributes if name.endswith(("href", "src")))
    assert ("content", "default-src 'none'; img-src data:; style-src 'unsafe-inline'") in page.attributes


def test_figures_share_no_ids_and_follow_the_page_colours(tmp_path: Path) -> None:
    html, page = page_of(whole_run(tmp_path / "run"))
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    used = re.findall(r'(?:href="#|url\(#)([^")]+)', html)
    assert used
    assert set(used) <= set(ids)
    assert set(re.findall(r"(?:fill|stroke): ([^;\"]+)", html)) <= {
        "none",
        *(f"var(--{name}, {shade.light})" for name, shade in PALETTE.items()),
    }


def luminance(colour: str) -> float:
    channels = np.array([int(colour[start : start + 2], 16) for start in (1, 3, 5)]) / 255
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_colours_have_enough_contrast(mode: str) -> None:
    paper = luminance(getattr(PALETTE["paper"], mode))
    for name, shade in PALETTE.items():
        other = luminance(getattr(shade, mode))
        contrast = (max(paper, other) + 0.05) / (min(paper, other) + 0.05)
        # WCAG 2.2: 4.5 for text, 3 for lines that carry meaning
        needed = 4.5 if name in ("ink", "quiet", "link", "alert") else 3.0 if name.startswith("series") else 1.0
        assert contrast >= needed, name
    assert len({shade.light for shade in PALETTE.values()}) == len(PALETTE)


def test_tables_and_figures_speak(tmp_path: Path) -> None:
    html, page = page_of(whole_run(tmp_path / "run"))
    assert all('role="img" aria-label="' in svg for svg in re.findall(r"<svg[^>]*>", html))
    assert all("scope=" in header for header in re.findall(r"<th[^>]*>", html.replace("<thead", "")))
    assert ("lang", "en") in page.attributes
    labels = [value for name, value in page.attributes if name == "aria-label"]
    assert "Accuracy against rounds, up to round 3, where it is: Accuracy 80.0 percent." in labels


def test_unfinished_run_says_so(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", recipe(rounds=50), [round_line(number) for number in range(13)])
    _, page = page_of(run)
    assert "This run is unfinished. The last recorded round is 12 of 50." in page.text
    assert "Accuracy 170.0 % round 12" in page.text
    assert f"Accuracy {100 * np.mean([0.5 + 0.1 * n for n in range(3, 13)]):.1f} % mean of last 10 tests" in page.text
    assert "18.0 MB 24.0 MB sent to them" in page.text  # summed over rounds
    assert "26.0 s 415 images a second" in page.text


def test_summary_before_the_last_round_is_unfinished(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", recipe(rounds=50), summary=summary())
    assert "This run is unfinished" in page_of(run)[1].text


def test_run_without_a_round_renders(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rounds=[])
    (run / "rounds.jsonl").unlink()
    _, page = page_of(run)
    assert "No round has been recorded yet (of 3 planned)." in page.text
    assert "threshold 0.95" in page.text
    assert "svg" not in page.tags


def test_summary_alone_renders(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", summary=summary())
    (run / "rounds.jsonl").unlink()
    (run / "recipe.toml").unlink()
    assert "Accuracy 80.0 % last round" in page_of(run)[1].text


@pytest.mark.parametrize("classes", ["known", "novel"])
def test_single_round_and_other_scenarios_render(tmp_path: Path, classes: str) -> None:
    metrics = (
        {"accuracy": 0.5} if classes == "known" else {"all": 0.5, "old": 0.6, "new": 0.4, "clusters": 12, "nmi": 0.3}
    )
    scenario = {"labels": "some-clients", "labelled_clients": 2, "classes": classes, "clients": 1, "partition": "iid"}
    run = write_run(
        tmp_path / "run",
        recipe(rounds=1, scenario=scenario),
        [round_line(1, metrics=metrics, pseudo={}, loss={})],
        summary=summary(metrics=metrics, metrics_last10=metrics, best=None, per_class=None),
    )
    html, page = page_of(run)
    assert "Labels at 2 of the clients; " in page.text
    assert "evenly spread over 1 client." in page.text
    assert "Pseudo-labels" not in page.text
    assert ("Accuracy, novel classes 40.0 %" in page.text) is (classes == "novel")
    assert ("AUROC" in page.text) is False
    assert {"0", "1", "round"} <= set(re.findall(r">([^<>]+)</text>", html))
    assert "0.96" not in html  # rounds are whole


def test_nulls_are_dashes(tmp_path: Path) -> None:
    nothing = {"accuracy": None, "auroc_seen": None}
    rounds = [
        round_line(0, metrics={"accuracy": 0.5}),
        round_line(
            1, loss={"total": None}, metrics=nothing, pseudo={"seen": 10, "used": 0, "accuracy": None}, seconds=None
        ),
    ]
    run = write_run(
        tmp_path / "run",
        recipe(rounds=1),
        rounds,
        summary=summary(
            metrics=nothing, metrics_last10=None, seconds=None, images_per_second=None, bytes_up=None, best={}
        ),
        scores={"bins": [0.0, 1.0], "known": None, "sets": {"seen": [1, 2, 3]}},
        partition={**partition(), "labelled": [[None] * 3] * 4},
    )
    _, page = page_of(run)
    assert "Accuracy – % round 1" in page.text
    assert "Accuracy – % the only test" in page.text
    assert "nan" not in page.text.lower().split()
    assert "Known or unknown" not in page.text


def test_last_ten_mean_is_missing_if_a_test_is(tmp_path: Path) -> None:
    rounds = [
        round_line(number, metrics={"accuracy": None if number == 2 else 0.5, "ari": 0.1 * number})
        for number in range(4)
    ]
    run = read_run(write_run(tmp_path / "run", rounds=rounds))
    assert run.metrics_last10["accuracy"] is None
    assert run.metrics_last10["ari"] == pytest.approx(0.2)  # rounds 1 to 3: round 0 is before any exchange


def test_half_a_last_line_is_forgiven_but_not_one_in_the_middle(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    whole = (run / "rounds.jsonl").read_text(encoding="utf-8")
    (run / "rounds.jsonl").write_text(whole + '{"round": 4, "lo', encoding="utf-8")
    assert read_run(run).last_round == 3
    (run / "rounds.jsonl").write_text('{"round": 0, "lo\n' + whole, encoding="utf-8")
    with pytest.raises(UserError, match=r"rounds\.jsonl, line 1"):
        write_report(run)


def test_a_round_that_was_repeated_after_a_resume_counts_once(tmp_path: Path) -> None:
    rounds = [round_line(1), round_line(2, seconds=100.0), round_line(2, seconds=1.0), round_line(3)]
    assert read_run(write_run(tmp_path / "run", rounds=rounds)).total("seconds") == 5.0


@pytest.mark.parametrize("name", ["recipe.toml", "summary.json", "partition.json", "scores.json", "features.json"])
def test_damaged_files_are_named(tmp_path: Path, name: str) -> None:
    run = whole_run(tmp_path / "run")
    (run / name).write_text("[1,", encoding="utf-8")
    with pytest.raises(UserError, match=re.escape(name)):
        write_report(run)
    assert not (run / "report.html").exists()


def test_no_run_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="elsewhere"):
        write_report(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="not a run directory"):
        write_report(tmp_path)
    with pytest.raises(UserError, match="nothing to compare"):
        find_runs([])


@pytest.mark.parametrize("highest", [0.0018, 0.02, 0.2])
def test_charts_say_the_numbers_of_their_axes(highest: float) -> None:
    """Coordinates are shortened, what is written is not: ticks of 0.0005 had become 0, 0, 0."""
    from matplotlib.figure import Figure

    from semifed.report.svg import inline_svg, page_style

    with page_style():
        figure = Figure()
        axes = figure.subplots()
        axes.plot([0, 1], [0, highest])
        axes.set_title("0.12345 of all")
        figure.canvas.draw()
        expected = [label.get_text() for label in axes.get_yticklabels()]
        drawn = re.findall(r"<text[^>]*>([^<]*)</text>", inline_svg(figure, "a chart"))
    inside = [text for text, place in zip(expected, axes.get_yticks(), strict=True) if 0 <= place <= highest]
    assert set(inside) <= {text.strip() for text in drawn}
    assert len(set(inside)) == len(inside) > 2
    assert "0.12345 of all" in {text.strip() for text in drawn}


def test_report_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = whole_run(tmp_path / "run")
    (run / "report.html").write_text("the one before", encoding="utf-8")

    def full_disk(self: Path, content: bytes) -> int:
        with self.open("wb") as file:
            file.write(content[:100])
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full_disk)
        with pytest.raises(UserError, match=r"report.html cannot be written: No space"):
            write_report(run)
    assert (run / "report.html").read_text(encoding="utf-8") == "the one before"
    files = {path.name for path in run.iterdir()}
    write_report(run)
    assert {path.name for path in run.iterdir()} == files
    assert "the one before" not in (run / "report.html").read_text(encoding="utf-8")


def test_many_clients_and_classes_stay_small_and_legible(tmp_path: Path) -> None:
    classes = [{"class": f"class {number}", "accuracy": number / 100, "count": 10} for number in range(100)]
    run = write_run(tmp_path / "run", summary=summary(per_class=classes), partition=partition(100, 100))
    html, page = page_of(run)
    assert len(html) < 1_000_000
    assert "100 classes, neighbours added up" in page.text
    assert "of 100 clients, evenly spaced" in page.text
    lowest, highest = page.text.index("The lowest"), page.text.index("The highest")
    assert lowest < page.text.index("class 0 0.0") < highest < page.text.index("class 99 99.0")


def test_same_run_same_bytes_from_many_threads(tmp_path: Path) -> None:
    runs = [whole_run(tmp_path / str(number)) for number in range(3)]
    with ThreadPoolExecutor(3) as pool:
        pages = {path.read_bytes() for path in pool.map(write_report, runs)}
    assert len(pages) == 1


def test_drawing_leaves_matplotlib_as_it_was(tmp_path: Path) -> None:
    import matplotlib

    with matplotlib.rc_context({"font.size": 31.0, "lines.marker": "x"}):
        styled = draw_partition(partition(), None)
        assert matplotlib.rcParams["font.size"] == 31.0
    assert styled == draw_partition(partition(), None)


def test_matplotlib_waits_for_the_first_figure() -> None:
    check = "import sys, semifed.report; print([n for n in ('matplotlib', 'jinja2', 'torch') if n in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", check], check=True, capture_output=True, text=True).stdout
    assert shown.strip() == "[]"


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_partition_to_a_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"held{suffix}"
    assert draw_partition(partition(), path) is None
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    if suffix == ".png":
        with Image.open(path) as image:
            colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 24) or ()}
            assert image.width > 600
        ring = tuple(int(PALETTE["series-2"].light[start : start + 2], 16) for start in (1, 3, 5))
        assert ring in colours
    else:
        text = path.read_text(encoding="utf-8")
        assert "&lt;b&gt;T&amp;shirt" in text
        assert "var(--" not in text


def test_partition_needs_a_picture_format(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"held\.pgn.*did you mean '\.png'"):
        draw_partition(partition(), tmp_path / "held.pgn")


def bubble_count(svg: str, colour: str) -> int:
    alone = re.findall(r'<use [^>]*style="[^"]*' + colour, svg)
    grouped = re.findall(r'<g style="[^"]*' + colour + r"[^>]*>((?:<use [^>]*/>)+)</g>", svg)
    return len(alone) + "".join(grouped).count("<use ")


def test_every_holding_has_a_bubble() -> None:
    held = partition(clients=6, classes=5)
    svg = draw_partition(held, None)
    assert svg is not None
    unlabelled, labelled = np.array(held["unlabelled"]), np.array(held["labelled"])
    assert bubble_count(svg, "series-1") == (unlabelled > 0).sum() + 2  # and two in the legend
    assert labelled.max() == 4  # one size in the legend, and one for the server
    assert (
        bubble_count(svg, "series-2") == (labelled > 0).sum() + 5 + 1 + 1
    )  # the server's, and one of each in the legend
    assert ">unknown<" in svg
    assert ">unknown<" not in (draw_partition({**held, "known": [True] * 5}, None) or "")


def test_partition_without_images_or_clients_draws() -> None:
    empty = {"classes": ["a"], "known": [True], "labelled": [], "unlabelled": [], "server": None}
    assert "<svg" in (draw_partition(empty, None) or "")
    assert "<svg" in (draw_partition({**empty, "labelled": [[0]], "unlabelled": [[0]], "server": [0]}, None) or "")


def test_ragged_partition_is_refused() -> None:
    with pytest.raises(UserError, match=r"partition\.json"):
        draw_partition({**partition(), "server": [1]}, None)


@given(st.lists(st.booleans(), min_size=1, max_size=300), st.integers(2, 80))
def test_class_groups_cover_all_and_never_mix(known: list[bool], most: int) -> None:
    groups = _class_groups(known, most)
    assert sorted(member for group in groups for member in group) == list(range(len(known)))
    assert len(groups) <= most
    assert all(len({known[member] for member in group}) == 1 for group in groups)


def table_text(held: dict[str, Any]) -> str:
    console = Console(width=100, record=True, file=io.StringIO())
    partition_table(held, console)
    return console.export_text()


def test_partition_table_counts() -> None:
    held = partition(clients=5, classes=4)
    labelled, unlabelled = np.array(held["labelled"]), np.array(held["unlabelled"])
    both, known = labelled + unlabelled, np.array(held["known"])
    rows = [line.split() for line in table_text(held).splitlines()]
    share = 100 * both[:, ~known].sum(1) / both.sum(1)
    for client in range(5):
        expected = [labelled[client].sum(), unlabelled[client].sum(), (both[client] > 0).sum(), f"{share[client]:.1f}"]
        assert [str(client), *map(str, expected)] in rows
    assert ["server", "160", "0", "4", "0.0"] in rows
    median = [f"{np.median(labelled.sum(1)):.0f}", f"{np.median(unlabelled.sum(1)):.0f}"]
    assert next(row for row in rows if row[:1] == ["median"])[1:3] == median


def test_partition_table_is_summarised_for_many_clients() -> None:
    first = [line.split()[0] for line in table_text(partition(clients=41)).splitlines() if line.split()]
    assert first[2:] == ["server", *"01234", "…", "36", "37", "38", "39", "40", "min", "median", "max"]
    assert "…" not in table_text(partition(clients=40))


@pytest.mark.parametrize(
    ("metric", "parts", "title"),
    [
        ("accuracy", ("", "accuracy"), "Accuracy"),
        ("auroc_unseen.mnist", ("", "auroc_unseen.mnist"), "AUROC, unseen set mnist"),
        ("auroc_unseen.old", ("", "auroc_unseen.old"), "AUROC, unseen set old"),
        ("current.accuracy", ("current", "accuracy"), "Accuracy (model in training)"),
        ("msp.auroc_unseen.a.b", ("msp", "auroc_unseen.a.b"), "AUROC, unseen set a.b (highest probability, MSP)"),
        ("best.energy.auroc_seen", ("best.energy", "auroc_seen"), "AUROC, seen unknowns (best, energy)"),
        ("some.thing", ("", "some.thing"), "some.thing"),
    ],
)
def test_metrics_of_other_models_and_scores_keep_their_names(metric: str, parts: tuple[str, str], title: str) -> None:
    assert words.split_metric(metric) == parts
    assert words.metric_title(metric) == title
    assert words.is_fraction(metric) is (metric != "some.thing")


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (3599.4, "59 min 59 s"),
        (3600, "1 h 00 min"),
        (7199, "2 h 00 min"),
    ],
)
def test_durations(seconds: float, shown: str) -> None:
    assert words.duration(seconds) == shown


@pytest.mark.parametrize(
    ("amount", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (9_999, "10.0 kB"),
        (123_456, "123 kB"),
        (999_600, "1.00 MB"),
        (5e13, "50.0 TB"),
    ],
)
def test_traffic(amount: float, shown: str) -> None:
    assert words.traffic(amount) == shown


FEATURES = {
    "points": [[0.0, 0.0], [1.0, 0.5], [1.1, 0.6], [3.0, 3.0], [4.0, 3.0]],
    "class": [0, 1, 1, -1, -1],
    "names": [NASTY, "Coat"],
    "pivots": [[0.1, 0.1], [1.0, 0.6]],
    "pivots_are": "pivots of the method",
    "explained": [0.25, 0.125],
    "space": "projection",
}


def open_set_line(number: int) -> dict[str, Any]:
    """A round of a method with a gate, pivots, trust in clients, a second model and further scores."""
    rng = np.random.default_rng(number)
    line = round_line(number)
    line["metrics"] |= {
        "current.accuracy": 0.5 + 0.1 * (number % 2),
        "current.auroc_seen": 0.8,
        "msp.auroc_seen": 0.7,
        "msp.auroc_overall": 0.71,
        "energy.auroc_seen": 0.6,
        "energy.auroc_overall": 0.61,
    }
    line["pivot_norm"] = 0.9 - number / 100
    if number:
        clients = [4, 0, 7, 2]
        correct = rng.permutation(50)[:4].tolist()
        line |= {
            "clients": clients,
            "gate": {"pass_known": 0.745, "pass_unknown": 0.105, "purity": 0.92},
            "per_client": {"client": clients[::-1], "correct": correct[::-1], "used": [50] * 4, "seen": [60] * 4},
            "client_weights": [0.5, 0.25, 0.125, 0.125],
            "alignment": [] if number == 1 else [2 - right / 100 for right in correct],
        }
    return line


def open_set_run(path: Path, rounds: int = 9) -> Path:
    scores = {**SCORES, "confidence": {**SCORES, "sets": {"seen": [50, 0]}}}
    lines = [open_set_line(number) for number in range(rounds)]
    return write_run(path, recipe(rounds=rounds - 1), lines, scores=scores, features=FEATURES)


def test_open_set_run_shows_every_picture(tmp_path: Path) -> None:
    html, page = page_of(open_set_run(tmp_path / "run"))
    for expected in (
        "known images let through, of all known 74.5",
        "unknown images let through, of all unknown 10.5",
        "known, of all let through 92.0",
        "right, of all pseudo-labels used 93.0",
        "length of the mean 0.82",
        "early (round 2 to 5): rank correlation −1.00",
        "late (round 6 to 8): rank correlation −1.00",
        "effective number 2.91 took part 4",
        "delivered 130.0 model in training 50.0",
        "Confidence on the test images",
        f"{NASTY} 1 image Coat 2 images unknown classes 2 images pivots of the method",
        "two principal axes with 38 % of the variance",
        "the method's own 90.0 90.0 92.5 92.5",
        "highest probability, MSP 70.0 70.0 71.0 71.0",
        "energy 60.0 60.0 61.0 61.0",
    ):
        assert expected in page.text
    # families and loss; models in two metrics; pseudo-labels; gate and pivots; map; trust; histograms
    assert page.tags.count("svg") == 3 + 2 + 2 + 2 + 1 + 2 + 2
    assert {"star", "dot"} <= set(re.findall(r'class="swatch (\w+)"', html))


def test_open_set_pictures_follow_the_page(tmp_path: Path) -> None:
    html, page = page_of(open_set_run(tmp_path / "run"))
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"(?:fill|stroke): ([^;\"]+)", html)) <= {
        "none",
        *(f"var(--{name}, {shade.light})" for name, shade in PALETTE.items()),
    }
    assert all(value.startswith("#") for name, value in page.attributes if name.endswith(("href", "src")))
    assert "b" in page.tags
    assert html.count("<b>") == html.count("</b>") == len(re.findall(r" <b>[^<]*</b></li>", html))


def test_metrics_of_other_models_stay_out_of_the_learning_curves(tmp_path: Path) -> None:
    html, _ = page_of(open_set_run(tmp_path / "run"))
    curves = re.search(r'<section id="curves">.*?</section>', html, flags=re.DOTALL)
    assert curves is not None
    assert "MSP" not in curves.group()
    assert "model in training" not in curves.group()


def test_runs_without_open_set_data_have_no_such_sections(tmp_path: Path) -> None:
    html, _ = page_of(whole_run(tmp_path / "run"))
    sections = re.findall(r'<section id="([^"]+)"', html)
    assert {"curves", "pseudo-labels", "scores"} <= set(sections)
    assert not {"steadiness", "gate", "features", "trust"} & set(sections)


def test_alignment_meets_the_correct_labels_of_the_same_client(tmp_path: Path) -> None:
    line = round_line(1, clients=[5, 3, 9], alignment=[1.5, 1.3, None])
    line["per_client"] = {"client": [9, 3, 5], "correct": [90, 30, 50], "used": [1, 1, 1], "seen": [1, 1, 1]}
    other = round_line(2, clients=[5, 3], alignment=[1.5])
    other["per_client"] = line["per_client"]
    first, second = read_run(write_run(tmp_path / "run", rounds=[line, other])).rounds
    assert first.reliability == (Reliability(1.5, 50), Reliability(1.3, 30))
    assert second.reliability == ()  # whose loss it is cannot be told


@given(
    st.lists(st.lists(st.tuples(st.integers(-9, 9), st.integers(0, 9)), min_size=0, max_size=7), min_size=1, max_size=5)
)
def test_correlation_is_that_of_ranks_within_rounds(rounds: list[list[tuple[int, int]]]) -> None:
    each = []
    for clients in rounds:
        ranks = np.array([rankdata([pair[side] for pair in clients]) for side in (0, 1)])
        if len(clients) > 1 and (np.ptp(ranks, axis=1) > 0).all():
            each.append(np.corrcoef(ranks)[0, 1])
    found = within_round_correlation([[Reliability(*pair) for pair in clients] for clients in rounds])
    assert found == (pytest.approx(np.mean(each), abs=1e-9) if each else None)


def test_levels_that_move_from_round_to_round_are_no_correlation() -> None:
    # Over all points loss and labels fall together; within each round they go apart.
    rounds = [[Reliability(10.0 * r + i, 10.0 * r - i) for i in range(3)] for r in range(4)]
    assert within_round_correlation(rounds) == pytest.approx(-1)


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=20))
def test_effective_clients_lie_between_one_and_all(weights: list[float]) -> None:
    shares = np.array(weights) / np.sum(weights)
    found = effective_clients(weights)
    assert found == pytest.approx(1 / (shares**2).sum())
    assert 1 - 1e-9 <= (found or 0) <= len(weights) + 1e-9
    assert effective_clients([0.0]) is None


def test_equal_weights_need_no_picture(tmp_path: Path) -> None:
    lines = [round_line(number, client_weights=[0.25] * 4) for number in range(3)]
    assert trust_charts(read_run(write_run(tmp_path / "equal", rounds=lines))) == []
    lines[2]["client_weights"] = [0.4, 0.2, 0.2, 0.2]
    (chart,) = trust_charts(read_run(write_run(tmp_path / "unequal", rounds=lines)))
    assert [(entry.name, entry.value) for entry in chart.legend] == [("effective number", "3.57"), ("took part", "4")]


@given(st.lists(st.floats(0, 1), max_size=20))
def test_steps_are_numpys(values: list[float]) -> None:
    late = np.diff(np.array(values)[len(values) // 2 :])
    found = step_deviation(list(values))
    assert found == (pytest.approx(late.std(ddof=1), abs=1e-12) if len(late) > 1 else None)


def test_steadiness_compares_the_models(tmp_path: Path) -> None:
    run = read_run(open_set_run(tmp_path / "run"))
    assert other_models(run) == ["current"]  # MSP and energy are scores, not models
    table = steadiness(run)
    assert table is not None
    # tests 4 to 8: the delivered one climbs evenly, the other jumps by ±0.1
    jump = 100 * np.std([0.1, -0.1, 0.1, -0.1], ddof=1)
    assert table.rows == [("delivered", ["0.00", "0.00", "0.00"]), ("model in training", [f"{jump:.2f}", "0.00", "–"])]
    assert "last 5 tests" in table.note
    assert steadiness(read_run(whole_run(tmp_path / "alone"))) is None


def test_only_scores_are_compared_by_auroc(tmp_path: Path) -> None:
    table = score_table(read_run(open_set_run(tmp_path / "run")))
    assert table is not None
    assert [name for name, _ in table.rows] == ["the method's own", "highest probability, MSP", "energy"]
    assert score_table(read_run(whole_run(tmp_path / "alone"))) is None


def test_gate_without_values_is_no_picture(tmp_path: Path) -> None:
    nothing = {"pass_known": None, "pass_unknown": None, "purity": None}
    lines = [round_line(number, gate=nothing) for number in range(3)]
    assert gate_chart(read_run(write_run(tmp_path / "none", rounds=lines))) is None
    lines[2]["gate"] = {**nothing, "pass_known": 0.9, "purity": 1.0}
    assert gate_chart(read_run(write_run(tmp_path / "all-known", rounds=lines))) is None
    lines[2]["gate"] = {**nothing, "pass_unknown": 0.5}
    chart = gate_chart(read_run(write_run(tmp_path / "one", rounds=lines)))
    assert chart is not None
    assert [entry.name for entry in chart.legend] == [
        "unknown images let through, of all unknown",
        "right, of all pseudo-labels used",
    ]


@pytest.mark.parametrize(
    ("changes", "stars", "dots"),
    [
        ({}, 2, 5),
        ({"pivots": None}, 0, 5),
        ({"pivots": [None, [1.0, 0.6]]}, 1, 5),
        ({"pivots": [[0.0, None], [1.0]]}, 0, 5),
        ({"points": [[0.0, None], *FEATURES["points"][1:]]}, 2, 4),
        ({"names": []}, 2, 5),
    ],
)
def test_map_draws_what_is_there(tmp_path: Path, changes: dict[str, Any], stars: int, dots: int) -> None:
    run = read_run(write_run(tmp_path / "run", features={**FEATURES, **changes}))
    chart = feature_map(run)
    assert chart is not None
    marks = re.findall(r"<use [^>]*/>", chart.svg)
    assert len(marks) == stars + dots
    assert sum(int(entry.value.split()[0]) for entry in chart.legend if entry.value) == dots
    assert any(entry.mark == "star" for entry in chart.legend) is (stars > 0)


@pytest.mark.parametrize("features", [{}, {"points": []}, {"points": None, "class": [1]}, {"points": "x", "names": 3}])
def test_map_of_nothing_is_left_out(tmp_path: Path, features: dict[str, Any]) -> None:
    assert feature_map(read_run(write_run(tmp_path / "run", features=features))) is None


def test_twenty_classes_of_a_map_look_different(tmp_path: Path) -> None:
    many = {"points": [[i, i] for i in range(21)], "class": [*range(20), -1], "names": [f"n{i}" for i in range(20)]}
    chart = feature_map(read_run(write_run(tmp_path / "run", features=many)))
    assert chart is not None
    assert len({(entry.colour, entry.mark) for entry in chart.legend}) == 21


def test_long_runs_stay_small(tmp_path: Path) -> None:
    chart, _ = trust_charts(read_run(open_set_run(tmp_path / "run", rounds=1500)))
    assert 1000 < chart.svg.count("<use ") <= 2000  # of 6,000 points
    assert [entry.value for entry in chart.legend] == ["−1.00", "−1.00"]


def test_the_threshold_is_told_with_what_it_costs_and_gains(tmp_path: Path) -> None:
    told = {"value": 0.25, "accept": 0.95, "accepted_known": 0.9312, "rejected_unknown": 0.5}
    run = Run(tmp_path, {}, summary={"threshold": told})
    assert "above a score of 0.25" in threshold_words(run)
    assert "accept 95% of new known images. Of the test images it accepts 93.1% of the known" in threshold_words(run)
    assert threshold_words(run).endswith("rejects 50.0% of the seen unknowns.")
    assert "rejects" not in threshold_words(
        Run(tmp_path, {}, summary={"threshold": {**told, "rejected_unknown": None}})
    )
    for absent in ({}, {"threshold": {**told, "value": None}}, {"threshold": None}):
        assert threshold_words(Run(tmp_path, {}, summary=absent)) == ""

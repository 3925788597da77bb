"""Figures in the page's own colours: matplotlib's SVG made small, collision-free and aware of dark mode."""

import io
import re
import threading
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Shade(NamedTuple):
    """A colour of the page on light paper and on dark."""

    light: str
    dark: str


# Every hex value under `light` is unique: an inline figure finds its CSS variable by it.
PALETTE: Final = {
    "paper": Shade("#fdfcfa", "#171716"),
    "ink": Shade("#1f1e1c", "#e8e5df"),
    "quiet": Shade("#5d5a54", "#aca79d"),
    "rule": Shade("#dcd8d0", "#3a3835"),
    "wash": Shade("#f3f0ea", "#22211f"),
    "link": Shade("#1d5c96", "#7db8ee"),
    "alert": Shade("#8f3a12", "#f0a57c"),
    "series-1": Shade("#1f6fb2", "#6db3f2"),
    "series-2": Shade("#c4521a", "#f2955c"),
    "series-3": Shade("#1b7f5c", "#5fcca0"),
    "series-4": Shade("#8a4fa3", "#c79be0"),
    "series-5": Shade("#946c00", "#e0bb4a"),
    "series-6": Shade("#b23a56", "#f0879d"),
    "series-7": Shade("#1f7f8c", "#66c7d2"),
    "series-8": Shade("#666a70", "#aab2bd"),
}
SERIES_COUNT: Final = 8

_NUMBER = re.compile(r"(?<![#\w-])-?\d+\.\d{2,}")  # coordinates: a hundredth of a point is enough
_VARIABLE: Final = {shade.light: f"var(--{name}, {shade.light})" for name, shade in PALETTE.items()}
_STYLE: Final[dict[Any, object]] = {
    "svg.fonttype": "none",  # text stays text: small, selectable, in the page's font
    "svg.hashsalt": "semifed",
    "text.parse_math": False,  # a class called "$5 note" is no formula
    "text.color": PALETTE["ink"].light,
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 7.5,
    "axes.edgecolor": PALETTE["rule"].light,
    "axes.labelcolor": PALETTE["quiet"].light,
    "axes.facecolor": "none",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.unicode_minus": True,
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "grid.color": PALETTE["rule"].light,
    "grid.linewidth": 0.6,
    "xtick.color": PALETTE["quiet"].light,
    "ytick.color": PALETTE["quiet"].light,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.major.pad": 4,
    "ytick.major.pad": 4,
}
_lock = threading.RLock()


def series_colour(position: int) -> str:
    """The colour of the series at this position, as drawn on light paper; eight, then again from the first."""
    return PALETTE[f"series-{position % SERIES_COUNT + 1}"].light


@contextmanager
def page_style() -> Iterator[None]:
    """Draws in the page's style whatever the user's matplotlib settings are, one thread at a time."""
    import matplotlib

    # matplotlib's settings and Python's warning filters belong to the process, so drawing takes turns.
    with _lock, matplotlib.rc_context(), warnings.catch_warnings():
        # The browser has glyphs that the font used for measuring lacks.
        warnings.filterwarnings("ignore", message=".*[Gg]lyph")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def inline_svg(figure: "Figure", description: str) -> str:
    """The figure as an SVG element for an HTML page, described for those who cannot see it."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return _inlined(buffer.getvalue(), description)


def _inlined(document: str, description: str) -> str:
    view_box = re.search(r'viewBox="([^"]+)"', document)
    body = re.search(r"<svg[^>]*>(.*)</svg>", document, flags=re.DOTALL)
    if view_box is None or body is None:
        raise ValueError("matplotlib wrote an SVG without a viewBox")
    # matplotlib's rule for `*` would reach every figure of the page: the root element carries it instead.
    content = re.sub(r"<style.*?</style>|<!--.*?-->", "", body.group(1), flags=re.DOTALL)
    content = re.sub(r'\s+font-family: [^;"]*;?|\s*transform="rotate\(-?0 [^"]*\)"', "", content)
    content = re.sub(r"\b(fill|stroke): (#[0-9a-f]{6})", _with_variable, content)
    content = content.replace("xlink:href", "href")
    content = _with_unique_ids(content, prefix=f"f{zlib.crc32(document.encode()):x}")
    content = re.sub(r"<[^>]*>", lambda tag: _NUMBER.sub(_shortened, tag[0]), content)  # never what is written
    content = re.sub(r">\s+<", "><", re.sub(r"\s*\n\s*", " ", content)).strip()
    content = _with_shared_marker_styles(content)
    for _ in range(3):
        content = re.sub(r"<(g|defs)\s*></\1>|<(g|defs)\s*/>", "", content)
    width, height = view_box.group(1).split()[2:]
    return (
        f'<svg role="img" aria-label="{escape(description)}" viewBox="0 0 {width} {height}" '
        f'style="--natural-width: {width}" stroke-linejoin="round" stroke-linecap="butt">{content}</svg>'
    )


def _shortened(match: "re.Match[str]") -> str:
    return f"{float(match.group()):.2f}".rstrip("0").rstrip(".")


def _with_variable(match: "re.Match[str]") -> str:
    return f"{match.group(1)}: {_VARIABLE.get(match.group(2), match.group(2))}"


def _with_shared_marker_styles(content: str) -> str:
    """Markers of one group look alike: the group carries the style that matplotlib repeats on each."""

    def shared(match: "re.Match[str]") -> str:
        styles = set(re.findall(r' style="([^"]*)"', match[2]))
        if len(styles) != 1:
            return match[0]
        return f'<g{match[1]} style="{styles.pop()}">' + re.sub(r' style="[^"]*"', "", match[2]) + "</g>"

    return re.sub(r"<g([^>]*)>((?:<use [^>]*/>){2,})</g>", shared, content)


def _with_unique_ids(content: str, prefix: str) -> str:
    referenced = dict.fromkeys(re.findall(r'(?:href="#|url\(#)([^")]+)', content))
    short = {name: f"{prefix}-{position}" for position, name in enumerate(referenced)}
    content = re.sub(r'\s+id="([^"]*)"', lambda match: f' id="{short[match[1]]}"' if match[1] in short else "", content)
    return re.sub(r'(href="#|url\(#)([^")]+)', lambda match: match[1] + short[match[2]], content)

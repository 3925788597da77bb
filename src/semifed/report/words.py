"""Numbers, metrics and scenarios in the words a reader outside the project understands."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from semifed.report.rundir_reader import Run, finite

MISSING = "–"

_METRIC_WORDS = {
    "accuracy": ("Accuracy", "test images of the known classes that were put into the right class"),
    "auroc_seen": (
        "AUROC, seen unknowns",
        "how well the unknown score separates known classes from the other ones of the same data; "
        "50 is guessing, 100 is perfect",
    ),
    "auroc_overall": ("AUROC, overall", "mean of the AUROC on seen unknowns and that on the unseen sets"),
    "fpr95_seen": (
        "FPR at 95 % TPR, seen unknowns",
        "false positive rate at the threshold with 95 % true positives; lower is better",
    ),
    "aupr_seen": ("AUPR, seen unknowns", "area under precision and recall"),
    "oscr_seen": (
        "OSCR, seen unknowns",
        "known images in the right class and accepted, against unknown ones accepted, over all thresholds",
    ),
    "all": (
        "Accuracy, all classes",
        "images in the group that stands for their class, by the best one-to-one match of groups with classes",
    ),
    "old": ("Accuracy, known classes", "the same, by the same match, over images of the classes that have labels"),
    "new": ("Accuracy, novel classes", "the same, by the same match, over images of the classes nobody has labelled"),
    "clusters": ("Groups found", "number of groups that hold an image; the best number is that of the true classes"),
    "all_balanced": (
        "Balanced accuracy, all classes",
        "mean over classes, so that small ones count as much as large ones",
    ),
    "old_balanced": ("Balanced accuracy, known classes", "mean over the classes that have labels"),
    "new_balanced": ("Balanced accuracy, novel classes", "mean over the classes nobody has labelled"),
    "nmi": (
        "NMI",
        "normalised mutual information: how much of the classes the groups tell; 0 is nothing, 100 is everything",
    ),
    "ari": (
        "ARI",
        "adjusted Rand index: pairs of images that are rightly together or apart; 0 is chance, 100 is perfect",
    ),
}
_BESIDE_WORDS = {
    "current": "model in training",
    "msp": "highest probability, MSP",
    "energy": "energy",
    "infomap": "Infomap",
    "kmeans": "k-means told the true number of classes",
    "plus": "with labelled images, FedLPA+",
}
MAIN_METRICS = ("all", "old", "new", "clusters", "accuracy", "auroc_seen", "auroc_overall")
_FRACTION_PREFIXES = ("accuracy", "auroc", "fpr", "aupr", "oscr")
_FRACTIONS = frozenset({"all", "old", "new", "all_balanced", "old_balanced", "new_balanced", "nmi", "ari"})
_METRIC_ORDER = (*MAIN_METRICS, "auroc_unseen")


def is_fraction(metric: str) -> bool:
    """Whether the metric lies between 0 and 1 and is shown in percent."""
    _, plain = split_metric(metric)
    return plain.startswith(_FRACTION_PREFIXES) or plain in _FRACTIONS


def split_metric(metric: str) -> tuple[str, str]:
    """`current.accuracy` is the accuracy of another model than the delivered one: its prefix and the plain metric."""
    parts = metric.split(".")
    for position, part in enumerate(parts):
        if part in _METRIC_WORDS or part == "auroc_unseen":
            return ".".join(parts[:position]), ".".join(parts[position:])
    return "", metric


def beside_words(prefix: str) -> str:
    """What a prefix of metrics stands for: another model, or another score of the same one."""
    return ", ".join(_BESIDE_WORDS.get(part, part) for part in prefix.split("."))


def metric_title(metric: str) -> str:
    """The metric's name for a heading."""
    prefix, plain = split_metric(metric)
    if prefix:
        return f"{metric_title(plain)} ({beside_words(prefix)})"
    family, _, test_set = metric.partition(".")
    if family == "auroc_unseen" and test_set:
        return f"AUROC, unseen set {test_set}"
    return _METRIC_WORDS.get(metric, (metric, ""))[0]


def metric_meaning(metric: str) -> str:
    """What the metric measures, in half a sentence; empty if it is not one of the documented keys."""
    if metric.startswith("auroc_unseen."):
        return "the same, against images of a kind that occurs in nobody's training data"
    return _METRIC_WORDS.get(metric, ("", ""))[1]


def metric_value(metric: str, value: float | None) -> str:
    """A metric for a table: percent with one decimal, or the bare number for counts."""
    if value is None:
        return MISSING
    return f"{100 * value:.1f}" if is_fraction(metric) else f"{value:.4g}"


def signed(points: float) -> str:
    """A difference in points, with one decimal and a minus sign that is one."""
    return f"{points:+.1f}".replace("-", "−")


def in_reading_order(metrics: Iterable[str]) -> list[str]:
    """Metrics with the headline ones first and those nobody documented last."""
    documented = list(_METRIC_WORDS)

    def place(order: Sequence[str], name: str) -> int:
        return order.index(name) if name in order else len(order)

    def rank(metric: str) -> tuple[int, int, str, int, str]:
        prefix, plain = split_metric(metric)
        family = metric.partition(".")[0]
        return place(_METRIC_ORDER, family), place(documented, metric), prefix, place(documented, plain), metric

    return sorted(set(metrics), key=rank)


def headline_metric(metrics: Iterable[str]) -> str:
    """The metric runs are ranked by: accuracy, or accuracy over all classes where novel ones are grouped."""
    return "all" if "all" in set(metrics) else "accuracy"


def count(value: float | None) -> str:
    """A whole number with separators."""
    return MISSING if value is None else f"{value:,.0f}"


def duration(seconds: float | None) -> str:
    """A time span in its two largest units."""
    if seconds is None:
        return MISSING
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02d} min"


def brief_duration(seconds: float | None) -> str:
    """The same without room to spare: `44.1s`, `1m 45s`, `2h 07m`."""
    return duration(seconds).replace(" min", "m").replace(" h", "h").replace(" s", "s")


def traffic(byte_count: float | None) -> str:
    """An amount of data in decimal units, three digits."""
    if byte_count is None:
        return MISSING
    amount, unit = byte_count, "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if amount < 999.5:
            break
        amount, unit = amount / 1000, larger
    if unit == "B":
        return f"{amount:.0f} B"
    return f"{amount:.{2 if amount < 9.995 else 1 if amount < 99.95 else 0}f} {unit}"


def setting(value: object) -> str:
    """A value of a recipe as the reader would write it."""
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} = {setting(inner)}" for key, inner in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(setting(inner) for inner in value) or "none"
    return str(value)


def scenario_words(scenario: Mapping[str, Any]) -> str:
    """The three questions of a scenario, answered in a sentence without its full stop."""
    parts = [_labels_words(scenario), _classes_words(scenario), _partition_words(scenario)]
    sentence = "; ".join(part for part in parts if part)
    return sentence[:1].upper() + sentence[1:]


def budget_words(run: Run) -> str:
    """How long the run was meant to be: rounds, clients a round, seed."""
    parts = []
    if run.planned_rounds is not None:
        rounds = f"{count(run.planned_rounds)} round{'' if run.planned_rounds == 1 else 's'}"
        per_round = finite(run.recipe.get("clients_per_round"))
        parts.append(f"{rounds} of {_clients(per_round)}" if per_round else rounds)
    if "seed" in run.recipe:
        parts.append(f"seed {run.seed}")
    return ", ".join(parts)


def _clients(number: float) -> str:
    return f"{count(number)} client{'' if number == 1 else 's'}"


def _labels_words(scenario: Mapping[str, Any]) -> str:
    where = scenario.get("labels")
    if where is None:
        return ""
    holders = finite(scenario.get("labelled_clients"))
    places = {
        "server": "labels at the server",
        "clients": "labels at the clients",
        "some-clients": f"labels at {count(holders)} of the clients" if holders else "labels at some of the clients",
    }
    words = places.get(str(where), f"labels: {where}")
    per_class = finite(scenario.get("labelled_per_class"))
    fraction = finite(scenario.get("labelled_fraction"))
    if per_class is not None:
        words += f", {count(per_class)} per class"
    elif fraction is not None:
        known = " of known classes" if scenario.get("classes") in ("open", "novel") else ""
        words += f", {100 * fraction:g} % of the images{known}"
    return words


def _classes_words(scenario: Mapping[str, Any]) -> str:
    classes = scenario.get("classes")
    if classes is None:
        return ""
    contents = {
        "known": "known classes only",
        "open": "unknown classes at the clients, to be rejected",
        "novel": "unknown classes at the clients, to be discovered",
    }
    return contents.get(str(classes), f"classes: {classes}")


def _partition_words(scenario: Mapping[str, Any]) -> str:
    partition, clients = scenario.get("partition"), finite(scenario.get("clients"))
    over = f" over {_clients(clients)}" if clients else ""
    if partition is None:
        return f"{_clients(clients)}" if clients else ""
    kinds = {
        "iid": "evenly spread",
        "dirichlet": "Dirichlet",
        "paired": "Dirichlet in pairs of clients",
        "balanced-dirichlet": "balanced Dirichlet",
        "shards": "shards",
        "folders": "spread as the folders are",
    }
    words = kinds.get(str(partition), str(partition))
    concentration = finite(scenario.get("alpha"))
    if concentration is not None and "dirichlet" in words.lower():
        words += f", alpha {concentration:g}," if partition == "paired" else f" {concentration:g}"
    return words + over

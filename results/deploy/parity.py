"""One table of digests: every method on every engine of this machine, a small recipe on real digits.

    python results/deploy/parity.py [METHOD ...] > parity.md

Local with one and with two workers, Flower's simulation on Ray, and Flower's deployment apps over folders of images
(the grid between them is in this process; `make test-deploy` has the real one).
"""

import hashlib
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
warnings.simplefilter("ignore")

from safetensors.torch import load_file  # noqa: E402

from local_grid import run_app  # noqa: E402
from semifed.assembly import prepare_run  # noqa: E402
from semifed.engines.flower import deployed_server  # noqa: E402
from semifed.methods import method_class, method_names  # noqa: E402
from semifed.recipe import check_recipe  # noqa: E402
from semifed.run import execute  # noqa: E402
from test_deploy import federation, founded  # noqa: E402
from test_golden import recipe_tables  # noqa: E402
from toys import Quiet  # noqa: E402

ROUNDS = 4
BOUNDS = "a bound, for simulations alone"
VALIDATES = "not compared: its server holds labelled images back, which no client of a federation gives"


def digest(out: Path) -> str:
    """Twelve digits of the model's sha256."""
    sums = hashlib.sha256()
    for name, tensor in sorted(load_file(out / "model" / "model.safetensors").items()):
        sums.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return sums.hexdigest()[:12]


def simulated(method: str, engine: dict[str, Any], out: Path) -> str:
    """The model of a run on an engine."""
    tables = {**recipe_tables(method), "rounds": ROUNDS, "engine": engine}
    tables = tables if needs_validation(method) else without_validation(tables)
    execute(prepare_run(check_recipe(tables)), out, Quiet())
    return digest(out)


def deployed(method: str, folder: Path) -> str:
    """The model of a federation of folders."""
    if method_class(method).opens_labels:
        return BOUNDS
    if needs_validation(method):
        return VALIDATES
    recipe = check_recipe(without_validation({**recipe_tables(method), "rounds": ROUNDS}))
    fed = founded(folder / "fed", recipe)
    run_app(deployed_server(), federation(fed, 4), {"folder": str(fed / "server"), "out": str(folder / "out")})
    return digest(folder / "out")


def needs_validation(method: str) -> bool:
    """Whether it groups images beside labelled ones of the server."""
    return bool(check_recipe(recipe_tables(method)).build_method().groups_by_labels())


def without_validation(tables: dict[str, Any]) -> dict[str, Any]:
    """In a federation no image is taken from a client for the server to validate with."""
    return {**tables, "scenario": {**tables["scenario"], "validation_fraction": 0.0}}


def main() -> None:
    """Print the table."""
    print("| method | local, 1 worker | local, 2 workers | Flower's simulation | Flower's deployment apps | equal |")
    print("|---|---|---|---|---|---|")
    for method in sys.argv[1:] or method_names():
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            found = [
                simulated(method, {"workers": 1}, folder / "one"),
                simulated(method, {"workers": 2}, folder / "two"),
                simulated(method, {"name": "flower", "workers": 2}, folder / "ray"),
                deployed(method, folder / "deployed"),
            ]
        same = len(set(found) - {BOUNDS, VALIDATES}) == 1
        print(f"| {method} | " + " | ".join(found) + f" | {'yes' if same else 'NO'} |", flush=True)


if __name__ == "__main__":
    main()

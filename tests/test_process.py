"""How a process that trains is set up."""

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from semifed.process import available_cores, keep_freed_memory, named_in, processor, settle, time_share


def test_a_process_that_trains_has_one_thread() -> None:
    settle()
    assert torch.get_num_threads() == 1


def test_glibc_agrees_to_keep_freed_memory_and_others_are_left_alone() -> None:
    assert keep_freed_memory() == (platform.libc_ver()[0] == "glibc")


ANSWERING = """
import json, sys
from semifed.engines import worker
from semifed.recipe_file import load_recipe
from semifed.assembly import build_workplace
build_workplace(load_recipe(sys.argv[1], []), (1, 28, 28), 6)
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules} | {n for n in sys.modules if "semifed" in n})))
"""


@pytest.mark.parametrize("recipe", ["sage/fashion-mini", "openfl/fashion-mini"])
def test_a_client_s_process_imports_what_it_needs(recipe: str) -> None:
    """Each worker pays for it at its start, and a deployed client with every message."""
    told = subprocess.run([sys.executable, "-c", ANSWERING, recipe], capture_output=True, text=True, check=True)
    loaded = set(json.loads(told.stdout))
    assert "torch" in loaded
    assert not loaded & {"scipy", "sklearn", "sympy", "matplotlib", "pandas", "semifed.methods.fedlpa"}


@pytest.mark.parametrize(
    ("limits", "cores"),
    [
        ({}, None),
        ({"pod/box": "max 100000"}, None),
        ({"pod/box": "200000 100000"}, 2),
        ({"pod/box": "150000 100000"}, 2),
        ({"pod/box": "5000 100000"}, 1),
        ({"pod": "300000 100000", "pod/box": "max 100000"}, 3),
        ({"pod": "300000 100000", "pod/box": "400000 100000"}, 3),
        ({"": "100000 50000"}, 2),
        ({"pod/box": "nonsense"}, None),
        ({"elsewhere": "100000 100000"}, None),
    ],
)
def test_a_container_s_share_of_the_processor(limits: dict[str, str], cores: int | None, tmp_path: Path) -> None:
    groups, own = tmp_path / "cgroup", tmp_path / "own"
    (groups / "pod" / "box").mkdir(parents=True)
    (groups / "elsewhere").mkdir()
    for name, limit in limits.items():
        (groups / name / "cpu.max").write_text(f"{limit}\n")
    own.write_text("1:cpu:/other\n0::/pod/box\n")
    assert time_share(groups, own) == cores
    own.write_text("1:cpu:/pod/box\n")
    assert time_share(groups, own) is None
    assert time_share(groups, tmp_path / "absent") is None
    assert available_cores() >= 1


def test_processors_that_share_a_name_are_told_apart() -> None:
    """They may round otherwise, and what is kept on disk for later runs, or stands in a table, is of one of them."""
    second = "processor\t: 1\nmodel\t\t: 9\n"
    one, other = (
        f"processor\t: 0\nvendor_id\t: A\ncpu family\t: {family}\nmodel\t\t: {model}\nmodel name\t: An EPYC\n\n{second}"
        for family, model in ((25, 17), (26, 2))
    )
    assert named_in(one) == "An EPYC family 25 model 17"
    assert named_in(other) == "An EPYC family 26 model 2"
    assert named_in("processor\t: 0\nmodel name\t: Plain\n") == "Plain"
    assert named_in("processor\t: 0\nCPU part\t: 0xd0c\n") is None
    assert processor().strip()

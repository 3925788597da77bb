"""Options and surroundings of all tests."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

# A busy machine is slow at times; that is no reason for an example to fail.
settings.register_profile("semifed", deadline=None, derandomize=True)
settings.load_profile("semifed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regolden", action="store_true", help="rewrite tests/golden/*.json from this machine's runs")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """As in every process of a run."""
    torch.set_num_threads(1)

"""Fixtures and options of all tests."""

from __future__ import annotations

import os
import sys

import pytest
from hypothesis import HealthCheck, settings

from sylvan.config.env import calm_threads
from tests.support import chosen

os.environ.setdefault("SYLVAN_LOAD_CACHE", "none")  # each test starts from nothing, or asks
calm_threads()  # as in the processes of a server; before anything imports PyTorch
# Nothing here measures time: a slow machine must not fail a test. In CI a run is repeatable.
settings.register_profile(
    "sylvan",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=os.environ.get("CI") == "true",
)
settings.load_profile("sylvan")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Workers of the suite share the cores: more threads than one only wait for each other."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        choices=chosen.NAMES,
        default="cpu",
        help="cuda: Triton's kernels are compiled and run there, and so is what is marked gpu",
    )


def pytest_configure(config: pytest.Config) -> None:
    chosen.choose(config.getoption("device"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not chosen.on_gpu():
        pytest.skip(chosen.WITHOUT)

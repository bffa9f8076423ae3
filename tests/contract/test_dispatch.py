"""Rows dispatched to the ranks of their experts, by the functions of DeepEP: the sums of others."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from sylvan.kernels.experts.deepep import DeepEPDispatcher
from sylvan.protocol.errors import ConfigError
from tests.support.deepep_ranks import COLS, LAYERS, LIBRARIES, run_layers
from tests.support.native import assert_close
from tests.support.ranks import in_threads

Sums = tuple[torch.Tensor, torch.Tensor]
"""Of one layer: see `run_layers`."""


def as_module(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let `deep_ep` be the module in a folder, for this test."""
    monkeypatch.setitem(sys.modules, "deep_ep", None)  # restores what is there now
    del sys.modules["deep_ep"]
    monkeypatch.syspath_prepend(str(folder))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A `deep_ep` that needs no GPU."""
    as_module(monkeypatch, LIBRARIES)


class Alone:
    """The first of two ranks, whose other one does not answer."""

    rank, size = 0, 2

    def gather(self, obj):
        raise RuntimeError("CUDA error: peer access is not supported\nmore")


def in_processes(folder: Path) -> list[Sums]:
    """The results of the first of two processes."""
    command = [sys.executable, "-m", "tests.support.deepep_ranks", str(folder)]
    root = Path(__file__).parents[2]
    other = subprocess.Popen(command, cwd=root, env=os.environ | {"OMP_NUM_THREADS": "1"})
    found = run_layers(folder, 0)
    assert other.wait(60) == 0
    return found


def in_two_threads(folder: Path) -> list[Sums]:
    """The results of the second of two threads."""
    return in_threads([partial(run_layers, folder, rank) for rank in range(2)])[1]


@pytest.mark.parametrize(
    "run", [in_two_threads, pytest.param(in_processes, marks=pytest.mark.slow)]
)
def test_ranks_that_dispatch_rows_add_up_as_with_all_to_all(library, tmp_path: Path, run):
    for layer, (dispatched, exchanged) in zip(LAYERS, run(tmp_path), strict=True):
        assert dispatched.shape == exchanged.shape == (layer.rows, COLS)
        assert_close(dispatched, exchanged, torch.bfloat16)
        if layer.rounds_once:
            assert torch.equal(dispatched, exchanged), layer


def test_a_machine_without_the_package_is_told_how_to_get_it_or_do_without():
    if importlib.util.find_spec("deep_ep"):
        pytest.skip("it is installed")
    with pytest.raises(ConfigError) as error:
        DeepEPDispatcher(Alone())

    assert "the package deep_ep is not installed; install it on this machine" in str(error.value)
    assert "leave --moe-a2a-backend" in str(error.value)


@pytest.mark.parametrize(
    ("columns", "top_k", "dtype", "why"),
    [
        (64, 2, torch.float16, r"rows are bfloat16, .* torch\.float16; set --dtype bfloat16, or l"),
        (36, 2, torch.bfloat16, "rows of 36 columns .* cannot be sent .a multiple of 8, and at mo"),
        (
            64,
            33,
            torch.bfloat16,
            "rows of 64 columns that visit 33 experts cannot be sent .*, and at most 32",
        ),
        (64, 2, torch.bfloat16, r"the GPUs found no way to each other \(CUDA error: [a-z ]+\); l"),
    ],
)
def test_rows_that_it_cannot_send_are_refused(library, columns, top_k, dtype, why):
    dispatcher = DeepEPDispatcher(Alone())

    with pytest.raises(ConfigError, match=rf"^parallel\.expert_exchange=deepep: {why}"):
        dispatcher.reserve(columns, top_k, dtype)


@pytest.mark.parametrize(
    "fault", ["import no_such_module_", "raise AssertionError('Duplicate NCCL')"]
)
def test_a_package_that_cannot_be_loaded_says_why(monkeypatch, tmp_path, fault):
    (tmp_path / "deep_ep.py").write_text(fault)
    as_module(monkeypatch, tmp_path)

    with pytest.raises(ConfigError, match=r"deep_ep cannot be loaded \(.*(no_such|Duplicate)"):
        DeepEPDispatcher(Alone())

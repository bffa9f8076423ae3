"""Profiles: what is written, and what happens if it cannot be."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from sylvan.kernels.native.cost import OpCost
from sylvan.protocol.commands import StartProfile, StopProfile
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.executor.profiling import MeasuredSteps, Profiling, op_times

COSTS = (OpCost("Linear", "tokens", 1000, 8), OpCost("Attention", "tokens", 0, 8))


class Program:
    """Two ops that took 4 and 1 us in two steps, on a machine that reads 1 byte a nanosecond."""

    def __init__(self) -> None:
        self.on = False

    def measure(self, *, on: bool) -> MeasuredSteps:
        self.on = on
        return MeasuredSteps(2, COSTS, (4000, 1000), None if on else 1e9)


@pytest.fixture
def profiling():
    made = Profiling()
    made.program = Program()
    yield made
    made.close()


def start(folder, **fields):
    return StartProfile(folder=str(folder), name="p", **fields)


def test_ops_are_compared_with_the_memory_that_they_read():
    linear, attention = op_times(MeasuredSteps(2, COSTS, (4000, 1000), 1e9))
    assert (linear.us_per_step, linear.floor_us, linear.floor_share) == (2.0, 1.0, 0.5)
    assert (attention.us_per_step, attention.floor_share) == (0.5, 0.0)


def test_a_profile_has_what_pytorch_computed_in_any_thread(profiling, tmp_path):
    profiling.start(start(tmp_path / "new", activities=("CPU",)))
    assert profiling.program.on
    torch.ones(8) @ torch.ones(8)
    files = profiling.stop(StopProfile())["files"]
    assert not profiling.program.on
    kinds = {path.rpartition("-")[2]: path for path in files}
    assert {"torch.trace.json", "ops.json"} <= {*kinds}
    names = {e.get("name") for e in _read(kinds["torch.trace.json"])["traceEvents"]}
    assert "aten::dot" in names
    ops = _read(kinds["ops.json"])
    assert (ops["steps"], ops["bytes_per_s"]) == (2, 1e9)
    assert [op["op"] for op in ops["ops"]] == ["Linear", "Attention"]


def test_one_at_a_time(profiling, tmp_path):
    profiling.start(start(tmp_path, activities=()))
    with pytest.raises(ConfigError, match="stop it first"):
        profiling.start(start(tmp_path, activities=()))
    profiling.stop(StopProfile())
    with pytest.raises(ConfigError, match="no profile"):
        profiling.stop(StopProfile())


def test_what_cannot_be_had_is_refused(profiling, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="output_dir"):
        profiling.start(start(tmp_path / "file" / "x"))
    with pytest.raises(ConfigError, match="activities"):
        profiling.start(start(tmp_path, activities=("NPU",)))
    profiling.start(start(tmp_path, activities=()))


def test_a_folder_that_takes_nothing_any_more_costs_the_profile_only(profiling, tmp_path):
    folder = tmp_path / "gone"
    profiling.start(start(folder, activities=("CPU",)))
    shutil.rmtree(folder)
    with pytest.raises(ConfigError, match="could not be written"):
        profiling.stop(StopProfile())
    assert not profiling.program.on
    profiling.start(start(tmp_path, activities=("CPU",)))  # and the next one is fine
    assert profiling.stop(StopProfile())["files"]


def _read(path):
    with open(path) as file:
        return json.load(file)

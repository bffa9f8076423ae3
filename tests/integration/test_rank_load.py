"""How much memory each rank takes to load a real checkpoint: little more than its share."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from sylvan import Engine
from sylvan.kernels import describe
from tests.integration.test_load_memory import models, numbers

__all__ = ["models"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(describe().variant is None, reason="kernels are not compiled"),
    pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc"),
]
FEW = 24 << 20
"""Buffers of steps and of ranks, a block of outputs that is being packed."""


def peaks(model: Path, **ranks: int) -> dict[str, int]:
    """Bytes that each rank held at most, by the module that it runs."""
    flags = {"device": "cpu", "threads": 1, "max_total_tokens": 1024, "load_cache": None}
    sizes = {"max_running_requests": 2, "scheduler__max_batch_tokens": 64, "processes": "many"}
    with Engine(model_path=str(model), dtype="float32", **flags, **sizes, **ranks) as engine:
        engine.generate(input_ids=[[5, 9, 20]], sampling_params={"max_new_tokens": 2})
        children = psutil.Process().children(recursive=True)
        found = {child.cmdline()[-1].rpartition(".")[2]: _peak(child) for child in children}
    return {name: found[name] for name in ("scheduler_process", "rank_process") if name in found}


def _peak(process: psutil.Process) -> int:
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


@pytest.mark.parametrize("ranks", [{"tp_size": 2}, {"pp_size": 2}], ids=["tp", "pp"])
def test_each_rank_holds_little_more_than_its_share_while_it_loads(models, ranks):
    small, large = models
    before, found = peaks(small, **ranks), peaks(large, **ranks)
    share = numbers(large, 4) * 4 / 2

    assert found.keys() == before.keys() == {"scheduler_process", "rank_process"}
    for name, most in found.items():
        assert 0.8 * share < most - before[name] < 1.2 * share + FEW, (name, most - before[name])

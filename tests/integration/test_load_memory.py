"""How much memory a process holds while it loads a model: at most 1.2 times the weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sylvan.kernels import describe
from tests.support import random_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(describe().variant is None, reason="kernels are not compiled"),
    pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc"),
]

LAYERS, HIDDEN, INNER = 48, 256, 1024  # 200 MB in float32, and no matrix of more than 2 MB
FEW = 16 << 20  # bytes of buffers of steps, and of a block of outputs that is being packed
_LOAD = """
import gc, json, sys
from dataclasses import replace
from pathlib import Path
from sylvan.runtime.executor.build import build_executor
from sylvan.runtime.executor.options import LocalOptions

OPTIONS = LocalOptions(page_size=16, num_pages=9, max_batch_tokens=32, max_running_reqs=2)


def held(what):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))


def load(folder, **changes):
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that from now on
    before = held("VmRSS")
    executor, facts = build_executor(Path(folder), replace(OPTIONS, **changes))
    peak = held("VmHWM") - before
    executor.close()
    return {"runner": facts.runner, "peak": peak, "kv": facts.kv_bytes}


small, large, cache, changes = sys.argv[1:]
changes = json.loads(changes)
load(small, **changes)  # what is imported and compiled once
if cache:
    changes["load_cache"] = Path(cache)
print(json.dumps(load(large, **changes)))
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A small model, and one whose weights dominate."""
    folder = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        small = random_model.write_random_model(folder / "small")
        patch.setattr(random_model, "LAYERS", LAYERS)
        large = random_model.write_random_model(folder / "large", hidden=HIDDEN, inner=INNER)
    return small, large


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Like `models`, in float16; a tied table is 40 % of the large one."""
    folder = tmp_path_factory.mktemp("tables")
    kind = {"tied": True, "dtype": np.float16}
    with pytest.MonkeyPatch.context() as patch:
        small = random_model.write_random_model(folder / "small", **kind)
        patch.setattr(random_model, "LAYERS", LAYERS)
        patch.setattr(random_model, "VOCAB", 150_000)
        large = random_model.write_random_model(
            folder / "large", hidden=HIDDEN, inner=INNER, **kind
        )
    return small, large


def peak(models: tuple[Path, Path], cache: Path | None = None, **changes: str) -> int:
    """Bytes that loading the large model takes at most, in a process of its own."""
    arguments = [*map(str, models), str(cache or ""), json.dumps(changes)]
    done = subprocess.run(
        [sys.executable, "-c", _LOAD, *arguments],
        check=True,
        capture_output=True,
        text=True,
        timeout=240,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["runner"].startswith("program")
    return found["peak"] - found["kv"]


def numbers(model: Path, size: int) -> int:
    """Of all weights, which have `size` bytes each in the file."""
    return (model / "model.safetensors").stat().st_size // size


@pytest.mark.parametrize(
    ("changes", "bits"),
    [({}, 32), ({"dtype": "bfloat16"}, 16), ({"quantization": "w8a8"}, 8.5)],
    ids=["float32", "bfloat16", "w8a8"],
)
def test_loading_takes_little_more_than_the_weights(models, tmp_path, changes, bits):
    weights = numbers(models[1], 4) * bits / 8
    for cache in (None, tmp_path / "cache", tmp_path / "cache"):  # without, cold, warm
        found = peak(models, cache, **changes)
        assert 0.8 * weights < found < 1.2 * weights + FEW, (found / weights, cache)


@pytest.mark.parametrize(
    ("changes", "bits"),
    [({"dtype": "bfloat16"}, 16), ({"dtype": "bfloat16", "quantization": "w8a8"}, 8.5)],
    ids=["bfloat16", "w8a8"],
)
def test_a_large_table_is_packed_a_few_rows_at_a_time(tables, changes, bits):
    weights = numbers(tables[1], 2) * bits / 8
    found = peak(tables, **changes)
    assert 0.8 * weights < found < 1.2 * weights + FEW, found / weights

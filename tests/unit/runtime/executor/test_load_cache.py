"""Packed weights of an earlier start: on equals off, and no other model's weights are taken."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sylvan.kernels import cache_files, describe
from sylvan.kernels.native import weights
from sylvan.protocol.commands import CheckHealth, DiskTensors, ReleaseMemory, UpdateWeights
from sylvan.runtime.executor import background_writes
from sylvan.runtime.executor import build as building
from sylvan.runtime.executor.build import build_executor
from sylvan.runtime.executor.options import LocalOptions
from tests.support import random_model
from tests.support.updates import write_changed

pytestmark = pytest.mark.skipif(describe().variant is None, reason="kernels are not compiled")

PATIENCE_S = 60.0
OPTIONS = LocalOptions(page_size=16, num_pages=9, max_batch_tokens=32, max_running_reqs=2)


@pytest.fixture
def model_dir(tmp_path, monkeypatch):
    monkeypatch.setattr(random_model, "INNER", 128)  # divides into groups
    return random_model.write_random_model(tmp_path / "model")


@pytest.fixture
def packed(monkeypatch):
    """Matrices that were packed, by their order."""
    count: list[object] = []
    for name in ("pack", "pack_plain"):
        real = getattr(weights, name)
        monkeypatch.setattr(
            weights, name, lambda *args, real=real: count.append(args[0]) or real(*args)
        )
    return count


def weights_of(model_dir: Path, options: LocalOptions) -> list[bytes]:
    """All that the program of a model keeps of its weights."""
    made: list[object] = []
    real = building.ProgramRunner

    class Seen(real):  # type: ignore[misc, valid-type]
        def __init__(self, *args: object, **more: object) -> None:
            super().__init__(*args, **more)
            made.append(self)

    building.ProgramRunner = Seen  # type: ignore[misc]
    try:
        executor, facts = build_executor(model_dir, options)
    finally:
        building.ProgramRunner = real  # type: ignore[misc]
    executor.close()
    assert facts.runner.startswith("program")
    (runner,) = made
    return [part.tobytes() for copy in runner.copies for part in copy.memory]  # type: ignore[attr-defined]


@pytest.mark.parametrize("quantization", [None, "w8a8", "w4a8", "int8", "int4", "fp8"])
def test_a_later_start_has_the_same_weights_and_packs_none(
    model_dir, tmp_path, packed, quantization
):
    plain = replace(OPTIONS, quantization=quantization)
    kept_there = replace(plain, load_cache=tmp_path / "a" / "cache")
    off = weights_of(model_dir, plain)
    cold = weights_of(model_dir, kept_there)
    assert packed
    packed.clear()

    warm = weights_of(model_dir, kept_there)

    assert not packed
    assert off == cold == warm


def test_formats_do_not_share_weights(model_dir, tmp_path, packed):
    for changes in ({}, {"dtype": "bfloat16"}, {"quantization": "w8a8"}):
        packed.clear()
        weights_of(model_dir, replace(OPTIONS, load_cache=tmp_path / "cache", **changes))
        assert packed

    assert len(list((tmp_path / "cache").iterdir())) == 3


def test_a_checkpoint_that_changed_is_packed_again(model_dir, tmp_path, packed):
    options = replace(OPTIONS, load_cache=tmp_path / "cache")
    weights_of(model_dir, options)
    packed.clear()
    file = next(model_dir.glob("*.safetensors"))
    os.utime(file, ns=(1, 1))

    weights_of(model_dir, options)

    assert packed


def test_the_time_alone_does_not_make_a_file_the_same(model_dir, tmp_path):
    options = replace(OPTIONS, load_cache=tmp_path / "cache")
    before = weights_of(model_dir, options)
    file = next(model_dir.glob("*.safetensors"))
    times = file.stat()
    data = bytearray(file.read_bytes())
    data[-4:] = np.float32(3.5).tobytes()
    file.write_bytes(data)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))

    assert weights_of(model_dir, options) != before


@pytest.mark.parametrize("damage", ["cut", "byte", "empty"])
def test_a_damaged_file_is_replaced(model_dir, tmp_path, packed, caplog, damage):
    options = replace(OPTIONS, load_cache=tmp_path / "cache")
    before = weights_of(model_dir, options)
    (file,) = (tmp_path / "cache").iterdir()
    whole = file.read_bytes()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    file.write_bytes({"cut": whole[:middle], "byte": flipped, "empty": b""}[damage])
    packed.clear()

    assert weights_of(model_dir, options) == before

    assert packed
    assert "load_cache: cached weights cannot be used, packing again" in caplog.text
    packed.clear()
    assert weights_of(model_dir, options) == before
    assert not packed


def test_a_full_disk_costs_the_cache_and_nothing_else(model_dir, tmp_path, monkeypatch, caplog):
    options = replace(OPTIONS, load_cache=tmp_path / "cache")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(cache_files.shutil, "disk_usage", lambda _: usage._replace(free=5))

    found = weights_of(model_dir, options)

    assert found == weights_of(model_dir, OPTIONS)
    assert "cannot write packed weights" in caplog.text
    assert not list((tmp_path / "cache").iterdir())


def test_files_that_were_not_used_for_longest_go(model_dir, tmp_path):
    options = replace(OPTIONS, load_cache=tmp_path / "cache")
    weights_of(model_dir, options)
    [large] = (tmp_path / "cache").iterdir()
    share = large.stat().st_size / shutil.disk_usage(tmp_path).total
    os.utime(large, (1, 1))

    for name in ("w8a8", "int4"):
        weights_of(model_dir, replace(options, load_cache_share=share, quantization=name))

    assert len(list((tmp_path / "cache").iterdir())) == 2
    assert not large.exists()


@pytest.mark.parametrize("change", ["update", "release"])
def test_weights_that_are_being_written_do_not_change(model_dir, tmp_path, monkeypatch, change):
    """A later start reads the checkpoint, whatever a trainer sends to this one."""
    options = replace(OPTIONS, load_cache=tmp_path / "cache")
    want = weights_of(model_dir, OPTIONS)
    (tmp_path / "other").mkdir()
    other_dir = write_changed(model_dir, tmp_path / "other")
    go_on, begun = threading.Event(), threading.Event()
    real = cache_files.write_blob

    def slow(*args: Any) -> int:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        return real(*args)

    monkeypatch.setattr(cache_files, "write_blob", slow)
    executor, _ = build_executor(model_dir, options)
    assert begun.wait(PATIENCE_S)
    assert executor.control(CheckHealth()).wait().body["healthy"], "this one does not wait"
    commands = {
        "update": UpdateWeights(DiskTensors(str(other_dir)), partial=False),
        "release": ReleaseMemory(("weights",)),
    }
    pending = executor.control(commands[change])
    assert not pending.done()

    go_on.set()

    assert not pending.wait().error
    executor.close()
    monkeypatch.setattr(cache_files, "write_blob", real)
    assert weights_of(model_dir, options) == want


def test_a_server_that_ends_waits_for_its_disk_a_moment_only(model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(background_writes, "_PATIENCE_S", 0.01)
    options = replace(OPTIONS, load_cache=tmp_path / "cache")
    ended: list[bool] = []
    real = cache_files.write_blob

    def slow(path: Path, about: Any, arrays: Any, asked: Callable[[], bool]) -> int:
        while not asked():
            time.sleep(0.001)
        ended.append(True)
        return real(path, about, arrays, asked)

    monkeypatch.setattr(cache_files, "write_blob", slow)
    executor, _ = build_executor(model_dir, options)

    executor.close()

    assert ended
    assert not list((tmp_path / "cache").iterdir())

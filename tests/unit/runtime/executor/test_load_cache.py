"""Packed weights of an earlier start: on equals off, and no other model's weights are taken."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sylvan.kernels import describe
from sylvan.kernels.native import kept, weights
from sylvan.runtime.executor import build as building
from sylvan.runtime.executor.build import build_executor
from sylvan.runtime.executor.options import LocalOptions
from tests.support import random_model

pytestmark = pytest.mark.skipif(describe().variant is None, reason="kernels are not compiled")

OPTIONS = LocalOptions(page_size=16, num_pages=9, max_batch_tokens=32, max_running_reqs=2)


@pytest.fixture
def model_dir(tmp_path, monkeypatch):
    monkeypatch.setattr(random_model, "INNER", 128)  # divides into groups
    return random_model.write_random_model(tmp_path / "model")


@pytest.fixture
def packed(monkeypatch):
    """Matrices that were packed, by their order."""
    count: list[object] = []
    real = weights.pack
    monkeypatch.setattr(weights, "pack", lambda *args: count.append(args[0]) or real(*args))
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
    assert "load_cache: packing again" in caplog.text
    packed.clear()
    assert weights_of(model_dir, options) == before
    assert not packed


def test_a_full_disk_costs_the_cache_and_nothing_else(model_dir, tmp_path, monkeypatch, caplog):
    options = replace(OPTIONS, load_cache=tmp_path / "cache")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(kept.shutil, "disk_usage", lambda _: usage._replace(free=5))

    found = weights_of(model_dir, options)

    assert found == weights_of(model_dir, OPTIONS)
    assert "packed weights are not kept" in caplog.text
    assert not list((tmp_path / "cache").iterdir())


def test_files_that_were_not_used_for_longest_go(model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "MOST_FILES", 2)
    folder = tmp_path / "cache"
    for number, name in enumerate((None, "w8a8", "int8")):
        weights_of(model_dir, replace(OPTIONS, load_cache=folder, quantization=name))
        for file in folder.iterdir():
            if file.stat().st_mtime > 100:
                os.utime(file, (number + 1, number + 1))

    assert sorted(f.stat().st_mtime for f in folder.iterdir()) == [2, 3]

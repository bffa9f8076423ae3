"""Kernels that were compiled for aarch64, run by an emulator: the portable ones have the bits of
those of x86-64, those with dot products the same numbers but for rounding.

Needs Debian's `g++-aarch64-linux-gnu` and `qemu-user-static`.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from sylvan.kernels import build, describe
from sylvan.runtime.executor.options import LocalOptions
from tests.support import random_model
from tests.support.step_export import write_step

CXX, QEMU = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64-static")
ROOT = Path("/usr/aarch64-linux-gnu")
LOGITS_BYTES = 2 * 288 * 4  # of two rows, padded
RUNNER = Path(__file__).parents[1] / "support/step_runner.cpp"
FORMATS = [
    {},
    {"dtype": "bfloat16"},
    {"quantization": "w8a8"},
    {"quantization": "w4a8"},
    {"quantization": "fp8"},
    {"quantization": "w4a16", "kv_dtype": "int8"},
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CXX or not QEMU, reason="no cross compiler or no emulator"),
    pytest.mark.skipif(describe().variant is None, reason="kernels are not compiled"),
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The libraries, and the program that runs steps by one of them."""
    folder = tmp_path_factory.mktemp("aarch64")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", str(CXX))
        flags = build.variants_of("linux-aarch64")
        built = build.build(folder, {name: flags[name] for name in ("portable", "neonbf16")})
    assert not built.failures
    runner = folder / "step_runner"
    command = [str(CXX), "-O1", "-std=c++20", str(RUNNER), "-o", str(runner), "-ldl"]
    subprocess.run(command, check=True)
    return built.libraries, runner


@pytest.mark.parametrize("changes", FORMATS, ids=str)
def test_a_step_has_the_same_bits(compiled, tmp_path, monkeypatch, changes):
    want = step(tmp_path, monkeypatch, changes)

    assert run(compiled, "portable", tmp_path) == want


@pytest.mark.parametrize("changes", FORMATS[:4], ids=str)
def test_dot_products_round_differently_at_most(compiled, tmp_path, monkeypatch, changes):
    want = step(tmp_path, monkeypatch, changes)

    found = run(compiled, "neonbf16", tmp_path)

    assert len(found) == len(want)
    mine, theirs = (np.frombuffer(x[:LOGITS_BYTES], np.float32) for x in (found, want))
    rounding = 2**-7 if changes.get("dtype") == "bfloat16" else 2**-12
    spread = np.abs(theirs).max()
    assert spread > 0
    assert np.abs(mine - theirs).max() < 16 * rounding * spread


def test_the_emulated_chip_has_them(compiled):
    """Bits 6 and 7 of `sylvan_cpu`."""
    libraries, runner = compiled
    done = subprocess.run(
        [str(QEMU), "-L", str(ROOT), str(runner), str(libraries["portable"])],
        check=True,
        timeout=300,
        capture_output=True,
    )

    assert int(done.stdout) & 0b11000000 == 0b11000000


def step(tmp_path, monkeypatch, changes) -> bytes:
    """Write a step down; returns what the portable kernels of this machine make of it."""
    monkeypatch.setattr(random_model, "INNER", 128)  # divides into groups
    model_dir = random_model.write_random_model(tmp_path / "model")
    sizes = {"page_size": 16, "num_pages": 9, "max_batch_tokens": 64, "max_running_reqs": 4}
    options = LocalOptions(threads=2, **sizes | changes)
    return write_step(model_dir, options, tmp_path / "step", monkeypatch)


def run(compiled, variant, tmp_path) -> bytes:
    """Logits and pages after the step."""
    libraries, runner = compiled
    files = [str(libraries[variant]), str(tmp_path / "step"), str(tmp_path / "result")]
    subprocess.run([str(QEMU), "-L", str(ROOT), str(runner), *files], check=True, timeout=300)
    return (tmp_path / "result").read_bytes()

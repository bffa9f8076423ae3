"""Kernels that were compiled for aarch64, run by an emulator: the bits of the portable x86-64 ones.

Needs Debian's `g++-aarch64-linux-gnu` and `qemu-user-static`.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from sylvan.kernels import build, describe
from sylvan.runtime.executor.options import LocalOptions
from tests.support import random_model
from tests.support.steps_elsewhere import write_step

CXX, QEMU = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64-static")
ROOT = Path("/usr/aarch64-linux-gnu")
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
    """The library and the program that runs steps by it."""
    folder = tmp_path_factory.mktemp("aarch64")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", str(CXX))
        built = build.build(folder, {"portable": ""})
    assert not built.failures
    runner = folder / "step_runner"
    command = [str(CXX), "-O1", "-std=c++20", str(RUNNER), "-o", str(runner), "-ldl"]
    subprocess.run(command, check=True)
    return built.libraries["portable"], runner


@pytest.mark.parametrize("changes", FORMATS, ids=str)
def test_a_step_has_the_same_bits(compiled, tmp_path, monkeypatch, changes):
    monkeypatch.setattr(random_model, "INNER", 128)  # divides into groups
    model_dir = random_model.write_random_model(tmp_path / "model")
    sizes = {"page_size": 16, "num_pages": 9, "max_batch_tokens": 64, "max_running_reqs": 4}
    options = LocalOptions(threads=2, **sizes | changes)
    want = write_step(model_dir, options, tmp_path / "step", monkeypatch)

    library, runner = compiled
    files = [str(library), str(tmp_path / "step"), str(tmp_path / "result")]
    subprocess.run([str(QEMU), "-L", str(ROOT), str(runner), *files], check=True, timeout=300)

    assert (tmp_path / "result").read_bytes() == want

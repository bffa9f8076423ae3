"""A system that refuses memory is one sentence with the bytes, whoever asked for them."""

from __future__ import annotations

import resource
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from sylvan.kernels.memory import allocate
from sylvan.kernels.native.library import describe
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.executor.build import build_executor
from sylvan.runtime.executor.options import LocalOptions
from tests.support.random_model import write_random_model

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="address space is limited there")

MIB = 1 << 20


@contextmanager
def at_most(more: int):
    """This process can have so many bytes more."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    held = pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_an_allocation_says_how_many_bytes_it_wanted():
    wanted = 4096 * MIB

    with at_most(1024 * MIB), pytest.raises(MemoryError, match=f"refuses {wanted:,} bytes"):
        allocate(wanted)


@pytest.mark.parametrize("runner", ["program", "eager"])
def test_a_cache_that_the_system_refuses_is_refused(tmp_path, runner):
    if runner == "program" and describe().variant is None:
        pytest.skip("kernels are not compiled")
    model = write_random_model(tmp_path / "model")
    options = LocalOptions(
        page_size=16,
        num_pages=1 << 20,
        max_batch_tokens=32,
        max_running_reqs=2,
        dtype="float32",
        runner=runner,
    )

    with (
        at_most(1024 * MIB),
        pytest.raises(ConfigError, match=r"^too little memory: .* [\d,]{11,} bytes.* Lower cache"),
    ):
        build_executor(model, options)

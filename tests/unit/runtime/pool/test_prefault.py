"""Pages become resident ahead of steps, and only while none runs."""

from __future__ import annotations

import ctypes
import mmap
import sys
import time

import numpy as np
import pytest
import torch

from sylvan.kernels.memory import allocate
from sylvan.runtime.core.step import NO_PAGES
from sylvan.runtime.pool.pages import PagedBuffer
from sylvan.runtime.pool.prefault import SLICE_BYTES, PagePrefaulter
from sylvan.runtime.pool.prefaulted import PrefaultedMemory
from sylvan.runtime.pool.releasable import TensorMemory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="residency is asked of Linux")
PAGE = 1 << 20
COUNT = 64
AHEAD = 8 * PAGE
ROUGH = 2 * SLICE_BYTES  # huge pages are mapped whole


def resident(memory: torch.Tensor) -> int:
    """Bytes, by mincore(2)."""
    start = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    count = (memory.data_ptr() + memory.numel() - start) // mmap.PAGESIZE
    flags = np.zeros(count, np.uint8)
    call = ctypes.CDLL(None, use_errno=True).mincore
    call.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
    assert call(start, count * mmap.PAGESIZE, flags.ctypes.data) == 0
    return int((flags & 1).sum()) * mmap.PAGESIZE


def until_resident(memory: torch.Tensor, num_bytes: int) -> None:
    deadline = time.monotonic() + 60
    while resident(memory) < num_bytes:
        assert time.monotonic() < deadline, f"{resident(memory)} bytes are resident"
        time.sleep(0.005)


def step_with(*pages: int) -> np.ndarray:
    return np.array([[0] * len(pages), [0] * len(pages), range(len(pages)), pages], np.int32)


@pytest.fixture
def buffer() -> PagedBuffer:
    return PagedBuffer(torch.from_numpy(allocate(COUNT * PAGE).reshape(1, COUNT, PAGE)), 16)


@pytest.fixture
def ahead(buffer):
    found = PagePrefaulter([buffer], AHEAD, idle_s=0.02)
    yield found
    found.close()


def test_pages_beyond_the_highest_used_one_become_resident(buffer, ahead):
    memory = buffer.memory
    memory[0, 3] = 7
    ahead.start()
    until_resident(memory, AHEAD)
    ahead.begin(step_with(1, 30))
    ahead.end()
    until_resident(memory[0, 31:39], AHEAD - mmap.PAGESIZE)
    ahead.close()
    assert resident(memory) <= 2 * AHEAD + PAGE + 2 * ROUGH
    assert (memory[0, 3] == 7).all()
    assert (memory[0, 31] == 0).all()


def test_nothing_is_done_while_a_step_runs(buffer, ahead):
    ahead.begin(NO_PAGES)
    ahead.start()
    time.sleep(0.2)
    assert resident(buffer.memory) == 0
    ahead.end()
    until_resident(buffer.memory, AHEAD)


def test_memory_that_was_given_back_stays_so_until_it_is_taken_again(buffer, ahead):
    occupation = PrefaultedMemory(TensorMemory([buffer.memory]), ahead)
    ahead.start()
    assert occupation.num_bytes == COUNT * PAGE
    assert occupation.release() == COUNT * PAGE
    ahead.begin(step_with(20))
    ahead.end()
    time.sleep(0.2)
    assert resident(buffer.memory) == 0
    occupation.resume()
    until_resident(buffer.memory, AHEAD)


def test_a_pool_may_be_used_up_while_its_pages_become_resident(buffer):
    ahead = PagePrefaulter([buffer], AHEAD, idle_s=0.0, populate=lambda *_: last_page())

    def last_page() -> bool:
        ahead.begin(step_with(COUNT - 1))
        ahead.end()
        return True

    ahead.start()
    ahead.begin(step_with(1))
    ahead.end()
    time.sleep(0.1)
    ahead.close()  # `-W error`: its thread has raised nothing


def test_a_system_that_cannot_is_asked_once(buffer):
    calls: list[int] = []

    def refuse(address: int, num_bytes: int) -> bool:
        calls.append(num_bytes)
        return False

    ahead = PagePrefaulter([buffer], AHEAD, idle_s=0.0, populate=refuse)
    ahead.start()
    deadline = time.monotonic() + 60
    while not calls and time.monotonic() < deadline:
        time.sleep(0.005)
    ahead.begin(step_with(40))
    ahead.end()
    ahead.close()
    assert calls == [SLICE_BYTES]


def test_pages_without_bytes_need_nothing():
    ahead = PagePrefaulter([PagedBuffer(torch.empty(0, 4, 0, dtype=torch.uint8), 16)])
    ahead.start()
    ahead.begin(step_with(1))
    ahead.end()
    ahead.close()

"""Staging memory of pages: reused, and never shared while in use."""

from __future__ import annotations

import numpy as np

from sylvan.runtime.features.tiers.staging import Staging
from tests.support.kv_store import LatePages, ScriptedThreads


def staging(max_bytes=1 << 20):
    pages = [
        LatePages(ScriptedThreads(), 50, size, lambda page: np.zeros(1), lambda page, row: None)
        for size in (64, 16)
    ]
    made = []
    for each in pages:
        each.host_buffer = lambda count, make=each.host_buffer: made.append(make(count)) or made[-1]
    return Staging(pages, max_bytes), made


def test_unreferenced_memory_is_used_again():
    buffers, made = staging()
    first = buffers.take(0, 4)
    assert first.shape == (4, 64)
    address = first.ctypes.data
    row = first[2]  # keeps all of it
    del first
    assert buffers.take(0, 4).ctypes.data != address
    del row
    assert buffers.take(0, 3).ctypes.data in {each.ctypes.data for each in made}
    assert len(made) == 2
    assert buffers.take(1, 4).shape == (4, 16), "another group has its own"
    assert len(made) == 3


def test_memory_that_is_too_small_or_too_much_is_not_kept():
    buffers, made = staging(max_bytes=300)
    one, two = buffers.take(0, 4), buffers.take(0, 4)
    del one, two
    assert buffers.take(0, 5).shape == (5, 64)
    assert len(made) == 3
    kept = [buffers.take(0, 4), buffers.take(0, 4)]
    assert len(made) == 4, "256 of 300 bytes were kept, so that one was made"
    assert kept[0].ctypes.data != kept[1].ctypes.data


def test_the_first_buffer_is_there_before_it_is_needed():
    buffers, made = staging()
    buffers.warm_up()
    buffers.take(0, 50)
    assert len(made) == 1

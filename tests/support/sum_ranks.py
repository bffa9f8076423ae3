"""A rank of an all-reduce over shared memory, by kernels in Triton's interpreter. Run as a script.

The interpreter changes Triton globally during a launch, so ranks are processes.
"""

from __future__ import annotations

import importlib
import mmap
import sys
from pathlib import Path

import numpy as np
import torch

CAPACITY, PAD = 16 * 1024, 64 * 8
"""Numbers of a room, and of the signals behind it."""
ONE_SHOT, TWO_SHOT = (1, 1000, 3000), (1, 3000, 9000)
"""Numbers of the messages."""


def message(rank: int, count: int) -> torch.Tensor:
    """Return a rank's numbers, of very different sizes, so that the order of sums matters."""
    generator = torch.Generator().manual_seed(10 * rank + count)
    return torch.randn(count, generator=generator) * 10.0 ** (rank - 1)


def file_bytes(size: int) -> int:
    """Return the size of the file that `size` ranks share, which starts as zeros."""
    return size * 4 * (CAPACITY + PAD)


def sums(path: Path, rank: int, size: int) -> list[torch.Tensor]:
    """Return the sums of all messages, each twice."""
    importlib.import_module("tests.support.interpreted")  # before any kernel
    from sylvan.kernels.collective.triton_sum import PROGRAMS, PeerBuffers, one_shot, two_shot

    assert PROGRAMS * size <= PAD
    with path.open("r+b") as file:
        memory = np.frombuffer(mmap.mmap(file.fileno(), 0), np.float32)
    firsts = [memory.ctypes.data + 4 * (CAPACITY + PAD) * other for other in range(size)]
    buffers_N = torch.tensor(firsts, dtype=torch.int64)
    rooms = PeerBuffers(buffers_N, buffers_N + 4 * CAPACITY, rank, CAPACITY)
    found = [one_shot(message(rank, count), rooms) for count in ONE_SHOT for _ in range(2)]
    return found + [two_shot(message(rank, count), rooms) for count in TWO_SHOT for _ in range(2)]


if __name__ == "__main__":
    given, own, count, out = sys.argv[1:]
    torch.save(sums(Path(given), int(own), int(count)), out)

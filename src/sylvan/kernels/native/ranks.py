"""Ranks on one machine, over memory that their processes share (`collective/ranks.cpp`)."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
import torch

from sylvan.kernels.memory import Bytes
from sylvan.kernels.native.library import Library
from sylvan.protocol.errors import ConfigError, RankLostError

BUFFER_BYTES = 1 << 20
"""Bytes that a rank sends at once; longer messages are split. Each rank has two such buffers."""


class SharedRanks:
    """Implements `Communicator`; the C++ library sums in the order of the reference.

    Attributes:
        memory: Memory that the ranks share; ops of programs use it, too.
        buffer_bytes: See `__init__`.
        timeout_s: See `__init__`.
    """

    def __init__(
        self,
        library: Library,
        path: Path,
        rank: int,
        size: int,
        timeout_s: float,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        """Map the memory; `join` waits for the others.

        Args:
            library: The compiled kernels.
            path: File of the memory; the first rank to arrive creates it.
            rank: Rank of this process.
            size: Number of ranks.
            timeout_s: Time limit of a collective.
            buffer_bytes: Size of a rank's buffer, the same on all ranks.

        Raises:
            ConfigError: the memory cannot be allocated.
        """
        self.rank, self.size = rank, size
        self.buffer_bytes, self.timeout_s = buffer_bytes, timeout_s
        self._dll = library.dll
        self._dll.sylvan_ranks_bytes.restype = ctypes.c_int64
        total = self._dll.sylvan_ranks_bytes(size, ctypes.c_int64(buffer_bytes))
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _set_aside(descriptor, total)
            self.memory: Bytes = np.frombuffer(mmap.mmap(descriptor, total), np.uint8)
        finally:
            os.close(descriptor)
        self._address = self.memory.ctypes.data

    def join(self, timeout_s: float) -> None:
        """Wait for all ranks.

        Raises:
            RankLostError: A rank did not arrive in time; the message names it.
        """
        lost = self._call("gather", timeout_s, None, None, 0)
        if lost:
            raise RankLostError(
                f"rank {abs(lost) - 1} of {self.size} did not join within {timeout_s:g} s"
            )

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        given = x.contiguous()
        found = given.new_empty(self.size, *x.shape)
        self._run("gather", given.data_ptr(), found.data_ptr(), given.nbytes)
        return found

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        given = x.contiguous()
        found = torch.empty_like(given)
        self._run("exchange", given.data_ptr(), found.data_ptr(), given.nbytes // self.size)
        return found

    def all_sum(self, x: torch.Tensor) -> torch.Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        self._run("sum", total.data_ptr(), total.numel())
        return total

    def check(self) -> None:
        size = ctypes.c_int64(self.buffer_bytes)
        given = ctypes.c_void_p(self._address), self.rank, self.size, size
        self._raise(self._dll.sylvan_ranks_lost(*given))

    def close(self) -> None:
        """Close this rank: ranks that wait for it fail."""
        self._dll.sylvan_ranks_close(
            ctypes.c_void_p(self._address), self.rank, self.size, ctypes.c_int64(self.buffer_bytes)
        )

    def _run(self, name: str, *given: int) -> None:
        self._raise(self._call(name, self.timeout_s, *given))

    def _raise(self, lost: int) -> None:
        if lost:
            how = "has exited" if lost < 0 else f"did not arrive within {self.timeout_s:g} s"
            raise RankLostError(f"rank {abs(lost) - 1} {how}")

    def _call(self, name: str, timeout_s: float, *given: int | None) -> int:
        *addresses, count = given
        return getattr(self._dll, f"sylvan_ranks_{name}")(
            ctypes.c_void_p(self._address),
            self.rank,
            self.size,
            ctypes.c_int64(self.buffer_bytes),
            ctypes.c_double(timeout_s),
            *map(ctypes.c_void_p, addresses),
            ctypes.c_int64(count or 0),
        )


def _set_aside(descriptor: int, num_bytes: int) -> None:
    """Allocate the memory now: if it is full, a later write would end the process (SIGBUS)."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, num_bytes)
        else:
            os.ftruncate(descriptor, num_bytes)
    except OSError as error:
        message = f"parallel.tp: cannot share {num_bytes} bytes of memory: {error.strerror}"
        raise ConfigError(message) from error

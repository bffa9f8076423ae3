"""Memory that can be returned to the system for a while, and reclaimed at the same address."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from sylvan.kernels.memory import release_pages


class ReleasableMemory(Protocol):
    """Memory that can be released and reclaimed."""

    @property
    def num_bytes(self) -> int:
        """Size in bytes while it is occupied."""
        ...

    def release(self) -> int:
        """Return it to the system, discarding its contents; return the number of bytes."""
        ...

    def resume(self) -> None:
        """Reclaim it. Its contents are zero, or undefined on a device."""
        ...


class TensorMemory:
    """Implements `ReleasableMemory` for tensors: whole storages, each once.

    On the CPU addresses stay valid. On a device they change, so graphs must be captured again.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        self._sizes = [(s, s.nbytes()) for s in storages.values() if s.nbytes()]

    @property
    def num_bytes(self) -> int:
        return sum(size for _, size in self._sizes)

    def release(self) -> int:
        """See `ReleasableMemory.release`.

        Raises:
            OSError: This system cannot release memory of a process.
        """
        freed = 0
        for storage, size in self._sizes:
            if storage.device.type == "cpu":
                freed += release_pages(_bytes(storage, size))
            else:
                storage.resize_(0)
                freed += size
        return freed

    def resume(self) -> None:
        for storage, size in self._sizes:
            if storage.device.type != "cpu":
                storage.resize_(size)


def _bytes(storage: torch.UntypedStorage, size: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    raw = (ctypes.c_uint8 * size).from_address(storage.data_ptr())
    return np.ctypeslib.as_array(raw)

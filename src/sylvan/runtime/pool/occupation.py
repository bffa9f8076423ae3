"""Memory that is given back to the system for a while, and taken again at the same place."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from sylvan.kernels.memory import give_back


class Occupation(Protocol):
    """Memory with a purpose."""

    @property
    def num_bytes(self) -> int:
        """How much it is while it is occupied."""
        ...

    def release(self) -> int:
        """Give it back, with its contents; returns how many bytes."""
        ...

    def resume(self) -> None:
        """Take it again. What is in it is zero, or undefined on a device."""
        ...


class TensorMemory:
    """Implements `Occupation` for tensors: whole storages, each once.

    On the CPU addresses stay as they are, so that whoever has them may keep them. On a device they
    change, and what was captured with them must be captured again.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        self._sizes = [(s, s.nbytes()) for s in storages.values() if s.nbytes()]

    @property
    def num_bytes(self) -> int:
        return sum(size for _, size in self._sizes)

    def release(self) -> int:
        """See `Occupation.release`.

        Raises:
            OSError: this system keeps the memory of a process.
        """
        freed = 0
        for storage, size in self._sizes:
            if storage.device.type == "cpu":
                freed += give_back(_bytes(storage, size))
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

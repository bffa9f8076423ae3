"""Ops that run in one call of the library. Imports no torch."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence

import numpy as np

from sylvan.kernels.memory import Bytes
from sylvan.kernels.native.library import Library


class NativePart:
    """Records of ops, bound to memory.

    Args:
        library: The library that runs them.
        records: Of `binding.OP`.
        memory: Of each entry of the ops' buffer table; must stay alive.

    Attributes:
        handle: For the library.
    """

    def __init__(self, library: Library, records: np.ndarray, memory: Sequence[Bytes]) -> None:
        records = np.ascontiguousarray(records)
        table = (ctypes.c_void_p * len(memory))(*(m.ctypes.data for m in memory))
        self.handle: int = library.dll.sylvan_program_new(
            records.ctypes.data, len(records), ctypes.addressof(table), len(memory)
        )
        weakref.finalize(self, library.dll.sylvan_program_free, self.handle)

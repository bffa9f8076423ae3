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
        records: The ops, of type `binding.OP`.
        memory: Memory of each entry of the ops' buffer table; must stay alive.
        max_rows: Maximum rows and maximum outputs of a step, which the memory must hold. Entries
          without memory are not checked: the caller binds them.

    Attributes:
        handle: The library's handle of this object.
    """

    def __init__(
        self,
        library: Library,
        records: np.ndarray,
        memory: Sequence[Bytes],
        max_rows: tuple[int, int] = (0, 0),
    ) -> None:
        """Check the operands of all ops.

        Raises:
            ValueError: an op would read or write beyond its memory, or the library does not have
              it; the message names the op and the operand.
        """
        records = np.ascontiguousarray(records)
        sizes, why = (
            np.array([m.nbytes for m in memory], np.int64),
            ctypes.create_string_buffer(256),
        )
        if not library.dll.sylvan_program_check(
            *(records.ctypes.data, len(records)),
            *(sizes.ctypes.data, len(memory)),
            *max_rows,
            *(why, len(why)),
        ):
            raise ValueError(why.value.decode())
        table = (ctypes.c_void_p * len(memory))(*(m.ctypes.data for m in memory))
        self.handle: int = library.dll.sylvan_program_new(
            records.ctypes.data, len(records), ctypes.addressof(table), len(memory)
        )
        weakref.finalize(self, library.dll.sylvan_program_free, self.handle)

"""A compiled program as stored in a file: its ops, and what its memory holds. Needs no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

from sylvan.kernels.memory import Bytes, allocate
from sylvan.kernels.native.binding import OP


class BufferSource(msgspec.Struct, frozen=True, array_like=True):
    """An entry of a program's buffer table.

    `scratch`: `at` bytes of zeros. `array`: array `at` of the program's own file. `weights`: array
    `at` of the file of packed weights. `pages`: KV, from byte `at` of each page on.
    """

    kind: Literal["scratch", "array", "weights", "pages"]
    at: int


@dataclass(frozen=True, slots=True)
class ProgramImage:
    """A program without the memory that steps write.

    Attributes:
        records: Its ops, of type `binding.OP`.
        pieces: Entries of its buffer table.
        arrays: Memory of the entries of kind `array`.
        logits: Entry of the logits, and float32 numbers from one row to the next.
    """

    records: np.ndarray
    pieces: Sequence[BufferSource]
    arrays: Sequence[Bytes]
    logits: tuple[int, int]

    def memory(self, weights: Sequence[Bytes], pages: Bytes) -> list[Bytes]:
        """Memory of each entry of the buffer table.

        Args:
            weights: Arrays of the file of packed weights.
            pages: All pages of KV, (pages, bytes of a page).

        Raises:
            IndexError: the program does not fit these weights.
        """
        flat = pages.reshape(-1)
        found: list[Bytes] = []
        for piece in self.pieces:
            match piece.kind:
                case "scratch":
                    found.append(allocate(piece.at))
                case "array":
                    found.append(self.arrays[piece.at])
                case "weights":
                    found.append(weights[piece.at])
                case "pages":
                    found.append(flat[piece.at :])
        return found


def image_of(
    records: np.ndarray,
    memory: Sequence[Bytes],
    logits: tuple[int, int],
    *,
    buffers: Collection[int],
    pages: Bytes,
    weights: Mapping[int, int],
) -> ProgramImage:
    """Build the image of a program that has not run yet.

    Args:
        records: Its ops.
        memory: Memory of each entry of the buffer table.
        logits: See `ProgramImage`.
        buffers: Entries that steps write.
        pages: All pages of KV, (pages, bytes of a page).
        weights: Numbers of arrays in the file of packed weights, by address.
    """
    assert records.dtype == OP
    pieces: list[BufferSource] = []
    arrays: list[Bytes] = []
    for entry, data in enumerate(memory):
        offset = data.ctypes.data - pages.ctypes.data
        if entry in buffers:
            pieces.append(BufferSource("scratch", data.nbytes))
        elif 0 <= offset < pages.shape[1]:
            pieces.append(BufferSource("pages", offset))
        elif (number := weights.get(data.ctypes.data)) is not None:
            pieces.append(BufferSource("weights", number))
        elif not data.any():  # scratch memory that no op declares to write
            pieces.append(BufferSource("scratch", data.nbytes))
        else:
            pieces.append(BufferSource("array", len(arrays)))
            arrays.append(np.ascontiguousarray(data))
    return ProgramImage(records, pieces, arrays, logits)

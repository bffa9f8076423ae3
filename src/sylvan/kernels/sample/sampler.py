"""Samples rows of logits on the CPU in one native call, each row with its own parameters."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from sylvan.kernels.native.library import Library
from sylvan.kernels.native.sampling import (
    SLOT_ARRAYS,
    ForcedTokens,
    Logprobs,
    SampleRows,
    SampleSlots,
)
from sylvan.protocol.arrays import FloatArray, IntArray


class LogprobRows:
    """Buffers for the log probabilities of R rows.

    Attributes:
        own: Log probabilities of the sampled tokens, (R,).
        top_ids, top: The most likely ids and their log probabilities, (R, alternatives).
        chosen: Log probabilities of the requested ids, (R, ids).
        struct: Pointers to these, for a native call.
    """

    def __init__(self, rows: int, alternatives: int, chosen: int) -> None:
        self.own: FloatArray = np.zeros(rows, np.float32)
        self.top_ids: IntArray = np.zeros((rows, alternatives), np.int32)
        self.top: FloatArray = np.zeros((rows, alternatives), np.float32)
        self.chosen: FloatArray = np.zeros((rows, chosen), np.float32)
        self.struct = Logprobs(
            own=self.own.ctypes.data,
            top_ids=self.top_ids.ctypes.data,
            top=self.top.ctypes.data,
            chosen=self.chosen.ctypes.data,
            top_stride=alternatives,
            chosen_stride=chosen,
        )


def slot_table(arrays: Mapping[str, NDArray[np.generic]]) -> SampleSlots:
    """Pointers to the parameters of request slots; the arrays must stay alive and not move."""
    return SampleSlots(**{name: arrays[name].ctypes.data for name in SLOT_ARRAYS})


class SampleCall:
    """Arguments of a native sampling, reused from step to step.

    Attributes:
        struct: Argument of the native call; set its `rows` after filling `slots` and `positions`.
        slots, positions: Request slot and token position of each row.
        ids, failed: Results by row; `failed` says that no token was valid.
    """

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        self.slots: IntArray = np.zeros(max_rows, np.int32)
        self.positions: IntArray = np.zeros(max_rows, np.int32)
        self.ids: IntArray = np.zeros(max_rows, np.int32)
        self.failed: NDArray[np.uint8] = np.zeros(max_rows, np.uint8)
        self._mask_of: IntArray = np.zeros(max_rows, np.int32)
        self._masks: IntArray | None = None
        self.struct = SampleRows(
            vocab=vocab_size,
            slots=self.slots.ctypes.data,
            positions=self.positions.ctypes.data,
            ids=self.ids.ctypes.data,
            failed=self.failed.ctypes.data,
        )

    def read(self, address: int, stride: int) -> None:
        """Set the logits: `stride` floats from row to row. Sampling overwrites them."""
        self.struct.logits, self.struct.stride = address, stride

    def use(self, table: SampleSlots) -> None:
        """Set the parameter table, which must stay alive."""
        self.struct.params = ctypes.addressof(table)

    def mask(self, rows: IntArray | None, bits: IntArray | None) -> None:
        """Constrain some rows: bit i of `bits[j]` allows id i in row `rows[j]`. None: no row."""
        if rows is None or bits is None:
            self.struct.mask_of = None
            return
        self._mask_of.fill(-1)
        self._mask_of[rows] = np.arange(len(rows), dtype=np.int32)
        self._masks = np.ascontiguousarray(bits, np.int32)
        self.struct.mask_of = self._mask_of.ctypes.data
        self.struct.masks = self._masks.ctypes.data
        self.struct.mask_stride = self._masks.shape[1]

    def collect_logprobs(self, logprobs: LogprobRows | None) -> None:
        """Set the buffers for requested log probabilities; None: no row requests them."""
        self.struct.logprobs = Logprobs() if logprobs is None else logprobs.struct


def sample(library: Library, call: SampleCall) -> int:
    """Sample one id per row, like the runtime's sampler; return the number of failed rows."""
    return library.dll.sylvan_sample(ctypes.byref(call.struct))


def logprobs_of(
    library: Library,
    logits: NDArray[np.float32],
    token_ids: IntArray,
    *,
    alternatives: int,
    chosen_ids: tuple[int, ...],
) -> LogprobRows:
    """Log probabilities of given tokens.

    Args:
        library: The loaded kernels.
        logits: (P, V), rows contiguous.
        token_ids: (P,); these and `chosen_ids` must be clamped to the vocabulary.
        alternatives: Number of most likely ids, at most V.
        chosen_ids: Ids requested in each row.
    """
    rows, vocab = logits.shape
    assert logits.dtype == np.float32
    assert logits.strides[1] == 4
    ids = np.ascontiguousarray(token_ids, np.int32)
    chosen = np.array(chosen_ids, np.int32)
    found = LogprobRows(rows, alternatives, len(chosen))
    given = ForcedTokens(
        rows=rows,
        vocab=vocab,
        stride=logits.strides[0] // 4,
        logits=logits.ctypes.data,
        ids=ids.ctypes.data,
        chosen_ids=chosen.ctypes.data,
        top=alternatives,
        num_chosen=len(chosen),
        logprobs=found.struct,
    )
    library.dll.sylvan_logprobs(ctypes.byref(given))
    return found

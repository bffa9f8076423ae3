"""Draws tokens from logits on the CPU: one native call for all rows, whatever their parameters."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sylvan.kernels.native.library import Library
from sylvan.protocol.arrays import IntArray


@dataclass(frozen=True, slots=True)
class DrawParams:
    """Parameters of each row. Arrays (R,); `top_k` at least 1, the vocabulary or more means all."""

    greedy: NDArray[np.bool_]
    temperature: NDArray[np.float32]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    uniform: NDArray[np.float64]  # in [0, 1)


class _Sample(ctypes.Structure):
    """Mirrors `Sample` of sample.cpp."""

    _fields_ = [
        ("rows", ctypes.c_int32),
        ("vocab", ctypes.c_int32),
        ("stride", ctypes.c_int64),
        *(
            (name, ctypes.c_void_p)
            for name in (
                "logits",
                "greedy",
                "temperature",
                "top_k",
                "top_p",
                "min_p",
                "uniform",
                "ids",
            )
        ),
    ]


_DTYPES = {
    "greedy": np.bool_,
    "temperature": np.float32,
    "top_k": np.int64,
    "top_p": np.float32,
    "min_p": np.float32,
    "uniform": np.float64,
}


def draw(library: Library, logits: NDArray[np.float32], params: DrawParams) -> IntArray:
    """One id a row; the definition is that of the runtime's sampler.

    Args:
        library: The loaded kernels.
        logits: (R, V), rows contiguous; final but for temperature. Not changed.
        params: By row.
    """
    rows, vocab = logits.shape
    assert logits.dtype == np.float32
    assert logits.strides[1] == 4
    ids = np.zeros(rows, np.int32)
    arrays = {
        name: np.ascontiguousarray(getattr(params, name), dtype) for name, dtype in _DTYPES.items()
    }
    sample = _Sample(
        rows=rows,
        vocab=vocab,
        stride=logits.strides[0] // 4,
        logits=logits.ctypes.data,
        ids=ids.ctypes.data,
        **{name: array.ctypes.data for name, array in arrays.items()},
    )
    library.dll.sylvan_sample(ctypes.byref(sample))
    return ids

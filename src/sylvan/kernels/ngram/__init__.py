"""Finds an earlier occurrence of the newest tokens of a text. Imports no torch."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import numpy as np

from sylvan.kernels.native.library import LibraryMissing, load
from sylvan.kernels.ngram import reference
from sylvan.protocol.arrays import IntArray

__all__ = ["compiled", "longest_match"]

Match = Callable[[IntArray, IntArray, int], tuple[int, int]]


def longest_match(corpus: IntArray, text: IntArray, longest: int) -> tuple[int, int]:
    """Find the longest suffix of `text` in `corpus`, which may be the text's own earlier part.

    Args:
        corpus: int32, contiguous.
        text: int32, contiguous.
        longest: Longest suffix to compare, in tokens.

    Returns: The index of the match's last token and the match length; the last match if several
        are equally long; (-1, 0) if the newest token does not occur.
    """
    return _implementation()(corpus, text, longest)


@functools.cache
def _implementation() -> Match:
    """The compiled kernel if there is one, else the reference."""
    try:
        return compiled()
    except LibraryMissing:
        return reference.longest_match


def compiled(variant: str | None = None) -> Match:
    """Return the search of a variant of the compiled kernels, by default of the best one.

    Raises:
        LibraryMissing: see `native.library.load`.
    """
    # keeps the GIL: a call takes less time than releasing and reacquiring it
    search = ctypes.PyDLL(str(load(variant).path)).sylvan_ngram_match
    search.restype = ctypes.c_int64
    search.argtypes = [
        *(ctypes.c_void_p, ctypes.c_int64) * 2,
        ctypes.c_int64,
        ctypes.POINTER(ctypes.c_int64),
    ]

    def native(corpus: IntArray, text: IntArray, longest: int) -> tuple[int, int]:
        place = ctypes.c_int64(-1)
        matched = search(
            _address(corpus), len(corpus), _address(text), len(text), longest, ctypes.byref(place)
        )
        return place.value, int(matched)

    return native


def _address(ids: IntArray) -> int:
    assert ids.dtype == np.int32
    assert ids.flags.c_contiguous
    return int(ids.__array_interface__["data"][0])

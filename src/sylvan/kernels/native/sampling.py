"""The structs of `sample.h` as Python sees them."""

from __future__ import annotations

import ctypes

_VOID, _I32, _I64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64

SLOT_ARRAYS = (
    "greedy",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "frequency",
    "presence",
    "repetition",
    "seed",
    "sample",
    "min_position",
    "has_penalty",
    "counts_row",
    "stops",
    "bias_ids",
    "bias",
    "chosen_ids",
    "num_stops",
    "num_bias",
    "num_chosen",
    "has_logprobs",
    "top",
    "counts",
)


class SampleSlots(ctypes.Structure):
    """Parameters of requests: addresses of arrays over request slots."""

    _fields_ = [(name, _VOID) for name in SLOT_ARRAYS]


class Logprobs(ctypes.Structure):
    """Destination of log probabilities."""

    _fields_ = [
        *((name, _VOID) for name in ("own", "top_ids", "top", "chosen")),
        ("top_stride", _I32),
        ("chosen_stride", _I32),
    ]


class SampleRows(ctypes.Structure):
    """Rows to sample."""

    _fields_ = [
        ("rows", _I32),
        ("vocab", _I32),
        ("stride", _I64),
        *((name, _VOID) for name in ("logits", "params", "slots", "positions")),
        ("mask_of", _VOID),
        ("masks", _VOID),
        ("mask_stride", _I64),
        ("ids", _VOID),
        ("failed", _VOID),
        ("logprobs", Logprobs),
    ]


class ForcedTokens(ctypes.Structure):
    """Rows whose tokens are given (forced)."""

    _fields_ = [
        ("rows", _I32),
        ("vocab", _I32),
        ("stride", _I64),
        *((name, _VOID) for name in ("logits", "ids", "chosen_ids")),
        ("top", _I32),
        ("num_chosen", _I32),
        ("logprobs", Logprobs),
    ]

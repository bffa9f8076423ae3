"""The C ABI as Python sees it; mirrors `program.h`."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

OP = np.dtype(
    [
        ("kind", "i4"),
        ("count", "i4"),
        ("type", "i4"),
        ("times", "i4"),
        ("buf", "i4", 12),
        ("n", "i4", 16),
        ("f", "f4", 4),
    ]
)


class Kind(IntEnum):
    """Which kernel."""

    EMBED = 0
    RMS_NORM = 1
    LAYER_NORM = 2
    QUANTISE = 3
    LINEAR = 4
    LINEAR_INT8 = 5
    LINEAR_INT4 = 6
    GLU = 7
    ACTIVATION = 8
    ROPE_STORE = 9
    ATTENTION = 10
    ATTENTION_MERGE = 11
    TAKE_ROWS = 12
    ADD = 13
    SCALE = 14
    SOFTCAP = 15
    CAST = 16
    SCALE_ROWS = 17
    ROUTE = 18
    ALIGN = 19
    GATHER = 20
    EXPERT_SUM = 21
    LATENT_ROWS = 22
    HEAD_GROUPS = 23
    TO_STACK = 24
    FROM_STACK = 25
    GATHER_LEVELS = 26
    SHORT_CONV = 27
    SPACE_SCAN = 28
    DELTA_SCAN = 29


FUNCTIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "tanh")
COUNTS = ("tokens", "outputs")
TYPES = ("bf16", "f32")


class Run(ctypes.Structure):
    """Everything that changes from step to step."""

    _fields_ = [
        *(
            (name, ctypes.c_int32)
            for name in ("tokens", "outputs", "seqs", "table_stride", "groups", "slot_step")
        ),
        ("table_step", ctypes.c_int64),
        *(
            (name, ctypes.c_void_p)
            for name in (
                "ids",
                "positions",
                "slots",
                "row_start",
                "kv_len",
                "table_row",
                "page_table",
                "out_rows",
                "types",
                "profile",
                "inputs",
                "sample",
            )
        ),
    ]


class Inputs(ctypes.Structure):
    """A step as the scheduler sees it; see `program.h`."""

    _fields_ = [
        *(
            (name, ctypes.c_int32)
            for name in ("seqs", "tokens", "outputs", "in_flight", "page_size", "vocab")
        ),
        ("numbers", ctypes.c_void_p),
        ("last_token", ctypes.c_void_p),
    ]


class PagedBytes(ctypes.Structure):
    """Memory in pages; see `program.h`."""

    _fields_ = [
        ("memory", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("regions", "region_step", "page_step", "width")),
    ]


@dataclass(frozen=True, slots=True)
class Constants:
    """Sizes that the library was compiled with."""

    kv_chunk: int
    query_tile: int
    row_pad: int
    max_head: int
    max_experts: int
    max_chosen: int

"""The C ABI as Python sees it; mirrors `program.h`."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from sylvan.kernels.native.opset import OPS
from sylvan.kernels.native.schema import fields_of

# Mirrors the library's OpRecord: operands are 4 bytes each, in the order of `fields_of`.
OP = np.dtype(
    [
        ("kind", "i4"),
        ("rows", "i4"),
        ("dtype", "i4"),
        ("times", "i4"),
        ("waits", "i4"),
        ("operands", "i4", max(len(fields_of(op)) for op in OPS)),
    ]
)


class StepRun(ctypes.Structure):
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
                "row_ends",
                "state_slots",
                "first_saves",
                "saves",
                "profile",
                "inputs",
                "sample",
            )
        ),
    ]


class StepInputs(ctypes.Structure):
    """A step as the scheduler sees it; see `program.h`."""

    _fields_ = [
        *(
            (name, ctypes.c_int32)
            for name in ("seqs", "tokens", "outputs", "in_flight", "page_size", "vocab")
        ),
        ("numbers", ctypes.c_void_p),
        ("last_token", ctypes.c_void_p),
        ("shifts", ctypes.c_void_p),
    ]


class PagedBytes(ctypes.Structure):
    """Memory in pages; see `program.h`."""

    _fields_ = [
        ("memory", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("regions", "region_step", "page_step", "width")),
    ]


class PackedRows(ctypes.Structure):
    """Source rows of a matrix and their destination; see `program.h`."""

    _fields_ = [
        ("rows", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("row_step", "count", "cols", "first", "words")),
        *((name, ctypes.c_int32) for name in ("type", "kind", "group", "unused")),
        *((name, ctypes.c_void_p) for name in ("data", "scale", "sums")),
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

"""Binds the inputs of a step to a native program."""

from __future__ import annotations

from sylvan.kernels.native.binding import StepRun
from sylvan.runtime.core.host import HostArrays


def run_arguments(host: HostArrays) -> StepRun:
    """Return the arguments of a program's runs, with pointers to these arrays."""
    return StepRun(
        table_stride=host.page_tables.shape[2],
        groups=len(host.page_tables),
        slot_step=host.slot_mappings.shape[1],
        table_step=host.page_tables[0].size,
        ids=host.input_ids.ctypes.data,
        positions=host.positions.ctypes.data,
        slots=host.slot_mappings.ctypes.data,
        row_start=host.q_starts.ctypes.data,
        kv_len=host.kv_lens.ctypes.data,
        table_row=host.req_slots.ctypes.data,
        page_table=host.page_tables.ctypes.data,
        out_rows=host.sample_rows.ctypes.data,
        types=host.token_types.ctypes.data,
    )

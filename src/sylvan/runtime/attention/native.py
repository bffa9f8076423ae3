"""Attention by C++ kernels, over pages in kernel order.

In step programs it consists of ops of the program (`NativeAttention` only declares capabilities).
Models that cannot be traced call it on tensors (`NativeTensorAttention`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch

from sylvan.kernels.api import HeadNorm, Rope
from sylvan.kernels.native.attend import HeadTransform, NativePagedAttention
from sylvan.kernels.native.binding import StepRun
from sylvan.runtime.attention.api import AttentionCaps, AttentionLayer, ForwardBatch


class NativeAttention:
    """Declares what the kernels support; step programs attend by themselves."""

    caps: ClassVar = AttentionCaps(
        devices=frozenset({"cpu"}),
        page_sizes=frozenset(range(16, 257, 16)),
        batch_invariant=True,
        row_ends=True,
        graph_capture=True,
        kv_scales=True,
        runners=frozenset({"program"}),
        kv_dtypes=frozenset({"model", "int8", "int4", "fp8_e4m3", "fp8_e5m2"}),
    )

    def plan(self, batch: ForwardBatch) -> None:
        """Do nothing: step programs plan by themselves."""

    def run(
        self,
        spec: AttentionLayer,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """Not supported on tensors; see `NativeTensorAttention`."""
        raise NotImplementedError("native attention is part of step programs")


class NativeTensorAttention:
    """The same kernels, called once per layer on tensors, over the pages of `attention`."""

    caps: ClassVar = replace(
        NativeAttention.caps,
        graph_capture=False,
        runners=frozenset({"eager"}),
        from_projection=True,
    )

    def __init__(self, attention: NativePagedAttention) -> None:
        self._attention = attention
        self._step = StepRun()
        self._positioned = StepRun()  # the same step, with token positions instead of row numbers
        self._causal: tuple[StepRun, StepRun] = (self._step, self._positioned)  # without row ends
        self._arrays: list[torch.Tensor] = []  # keeps the arrays alive that the steps point at
        self._rows = torch.zeros(0, dtype=torch.int32)  # row numbers 0, 1, 2, ...

    def clear_cache(self) -> None:
        """Drop compiled programs, because norms and sinks of the model have changed."""
        self._attention.clear_cache()

    def plan(self, batch: ForwardBatch) -> None:
        """Set the step's pointers to the rows and pages of its requests."""
        given = (
            batch.slot_mappings,
            batch.q_starts_R,
            batch.kv_lens_R,
            batch.req_slots_R,
            batch.page_tables,
            batch.positions_T,
        )
        self._arrays = [array.to(torch.int32).contiguous() for array in given]
        slots, starts, lens, rows, tables, at = (array.data_ptr() for array in self._arrays)
        if len(self._rows) < batch.num_tokens:
            self._rows = torch.arange(batch.num_tokens, dtype=torch.int32)
        step_of = partial(
            StepRun,
            tokens=batch.num_tokens,
            seqs=batch.num_reqs,
            table_stride=batch.page_tables.shape[2],
            groups=len(batch.page_tables),
            slot_step=batch.num_tokens,
            table_step=batch.page_tables[0].numel(),
            slots=slots,
            row_start=starts,
            kv_len=lens,
            table_row=rows,
            page_table=tables,
        )
        places = self._rows.data_ptr(), at
        self._step, self._positioned = (step_of(positions=place) for place in places)
        self._causal = self._step, self._positioned
        if batch.row_ends is not None:
            self._arrays.append(torch.from_numpy(batch.row_ends))
            ends = self._arrays[-1].data_ptr()
            self._step, self._positioned = (
                step_of(positions=place, row_ends=ends) for place in places
            )

    def run(
        self,
        spec: AttentionLayer,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        step = self._step if spec.row_ends else self._causal[0]
        return self._attention.run(spec, (q_TNH, k_TKH, v_TKH), step)

    def run_fused(
        self,
        spec: AttentionLayer,
        qkv: torch.Tensor,
        rope: Rope | None,
        norms: tuple[HeadNorm | None, HeadNorm | None],
        batch: ForwardBatch,
    ) -> torch.Tensor:
        step = self._positioned if spec.row_ends else self._causal[1]
        return self._attention.run_fused(spec, qkv, rope, norms, step)

    def run_rotated(
        self,
        spec: AttentionLayer,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        batch: ForwardBatch,
        table_TR: torch.Tensor,
    ) -> torch.Tensor:
        step = self._step if spec.row_ends else self._causal[0]
        return self._attention.run(spec, (q_TNH, k_TKH, v_TKH), step, HeadTransform(table_TR))


BACKEND = NativeAttention

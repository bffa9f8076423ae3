"""Traces and compiles a draft head as native step programs.

Shapes: T rows, R rows whose logits are wanted, F columns read from the model, D hidden size of
the head, W tokens that it can draft.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from sylvan.kernels import ops
from sylvan.kernels.api import TracedTensor
from sylvan.kernels.native.attend import NativePagedAttention
from sylvan.kernels.native.compile import compile_graph
from sylvan.kernels.native.graph import ProgramLimits
from sylvan.kernels.native.library import Library
from sylvan.kernels.native.program import Program
from sylvan.kernels.native.tracer import NativeTracer
from sylvan.runtime.attention.native import NativeTensorAttention
from sylvan.runtime.core.forward import BatchLimits, ForwardBatch
from sylvan.runtime.executor.graphs.arguments import run_arguments
from sylvan.runtime.executor.graphs.pages import NativePool
from sylvan.runtime.executor.graphs.partial import (
    SymbolicBatch,
    check_host_modules,
    finish_host_modules,
    host_modules,
)


@dataclass(frozen=True, slots=True)
class _Traced:
    """Values of a traced head that are written before a pass or read after it."""

    read: TracedTensor
    hidden: TracedTensor
    rest: int  # segment of everything after `hidden`
    next_hidden: TracedTensor
    logits: TracedTensor


class DraftHeadModule(Protocol):
    """A drafting module, see `models.draft_heads.EagleHead`; its ops also take traced values."""

    def fuse(self, read_TF: Any) -> Any:
        """Project the model's vectors to the input of `forward`. Shape: (T, F) -> (T, D)."""
        ...

    def forward(self, hidden_TD: Any, batch: Any) -> tuple[Any, Any]:
        """Return the input of `head`, and the vectors fed at the next positions: (T, D) each."""
        ...

    def head(self, rows_RD: Any) -> Any:
        """Logits of the tokens that can be drafted: float32 (R, W)."""
        ...


class HeadProgram:
    """Runs passes of a draft head over the buffers of one batch, one native call each.

    Args:
        head: The head with its weights, which compiling packs and frees.
        columns: F.
        layer: Index of its attention layer.
        batch: Buffers of all passes; its pool has one layer.
        library: Native kernels.
        dtype: Type of the rows.
    """

    def __init__(
        self,
        head: DraftHeadModule,
        columns: int,
        batch: ForwardBatch,
        library: Library,
        dtype: torch.dtype,
        layer: int = 0,
    ) -> None:
        """Trace and compile `head`.

        Raises:
            Unsupported: an op or shape has no kernel; the message names it.
        """
        assert isinstance(batch.kv, NativePool)
        limits: BatchLimits = batch.limits
        sizes = ProgramLimits(max_tokens=limits.max_tokens, max_outputs=limits.max_sampled_rows)
        pages = {layer: batch.kv.layers[0]}
        parts = dtype, sizes, pages, library.constants
        tracer = NativeTracer(*parts)
        with host_modules(head, NativeTracer(*parts)) as called:
            self._traced = traced = _trace(head, columns, tracer)
        check_host_modules(called)
        layout = compile_graph(tracer.graph)
        if called:  # both passes attend over the same pages
            finish_host_modules(called, dtype, torch.get_num_threads())
            batch.attention = NativeTensorAttention(NativePagedAttention(library, dtype, pages))
        self._whole = Program(library, layout)
        self._rest = Program(library, layout, traced.rest)
        self._run, self._batch = run_arguments(batch.host), batch
        whole, outputs = self._whole, limits.max_sampled_rows
        self._logits_RW = whole.read(traced.logits, outputs)
        self._next_RD = whole.read(traced.next_hidden, outputs)
        self._hidden_TD = whole.read(traced.hidden, limits.max_tokens)
        whole.write(traced.hidden, torch.zeros_like(self._hidden_TD))  # including padding rows

    def extend(self, read_TF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a pass over positions whose model vectors are known.

        Returns: logits float32 (R, W) and vectors (R, D) of the sampled rows; views that live
        until the next pass.
        """
        self._whole.write(self._traced.read, read_TF)
        return self._pass(self._whole)

    def predict_next(self, hidden_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a pass over drafts, fed with the head's own vectors; returns as `extend` does."""
        self._hidden_TD[: len(hidden_TD)] = hidden_TD
        return self._pass(self._rest)

    def _pass(self, program: Program) -> tuple[torch.Tensor, torch.Tensor]:
        run, batch = self._run, self._batch
        run.tokens, run.outputs, run.seqs = batch.num_tokens, batch.num_samples, batch.num_reqs
        if program.calls_host:
            batch.ready(batch.num_tokens, batch.num_reqs, batch.num_samples)
            batch.attention.plan(batch)
        program.run(run, batch)
        rows = batch.num_samples
        return self._logits_RW[:rows], self._next_RD[:rows]


def _trace(head: DraftHeadModule, columns: int, tracer: NativeTracer) -> _Traced:
    batch = SymbolicBatch(tracer)
    read = tracer.input(columns, tracer.dtype)
    hidden: TracedTensor = head.fuse(read)
    rest = tracer.next_segment()
    out, own = head.forward(hidden, batch)
    next_hidden = ops.take_rows(own, batch.sample_rows)
    taken = next_hidden if own is out else ops.take_rows(out, batch.sample_rows)
    logits: TracedTensor = head.head(taken)
    for value in (hidden, next_hidden, logits):
        tracer.pin(value)
    return _Traced(read, hidden, rest, next_hidden, logits)

"""Traces and compiles a draft head as native step programs.

Shapes: T rows, R rows whose logits are wanted, F columns that are read of the model, D hidden of
the head, W tokens that it can guess.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sylvan.kernels import ops
from sylvan.kernels.api import TracedTensor
from sylvan.kernels.native.compile import compile_graph
from sylvan.kernels.native.graph import ProgramLimits
from sylvan.kernels.native.library import Library
from sylvan.kernels.native.program import Program
from sylvan.kernels.native.tracer import NativeTracer
from sylvan.runtime.core.forward import BatchLimits, ForwardBatch
from sylvan.runtime.executor.graphs.pages import NativePool
from sylvan.runtime.executor.graphs.program import SymbolicBatch, bound
from sylvan.runtime.models.draft_heads import DraftHead


@dataclass(frozen=True, slots=True)
class _Traced:
    """Values of a traced head that are written before, or read after, a pass."""

    read: TracedTensor
    hidden: TracedTensor
    rest: int  # segment of all after `hidden`
    next_hidden: TracedTensor
    logits: TracedTensor


class HeadProgram:
    """Passes of a draft head over the buffers of one batch, a native call each.

    Args:
        head: With its weights, which compiling packs and frees.
        columns: F.
        batch: Buffers of all passes; its pool has one layer.
        library: Kernels.
        dtype: Of the rows.
    """

    def __init__(
        self,
        head: DraftHead,
        columns: int,
        batch: ForwardBatch,
        library: Library,
        dtype: torch.dtype,
    ) -> None:
        """Trace and compile `head`.

        Raises:
            Unsupported: an op or shape has no kernel; the message names it.
        """
        assert isinstance(batch.kv, NativePool)
        limits: BatchLimits = batch.limits
        sizes = ProgramLimits(max_tokens=limits.max_tokens, max_outputs=limits.most_samples)
        tracer = NativeTracer(dtype, sizes, batch.kv.layers, library.constants)
        self._traced = traced = _trace(head, columns, tracer)
        layout = compile_graph(tracer.graph)
        self._whole = Program(library, layout)
        self._rest = Program(library, layout, traced.rest)
        self._run, self._batch = bound(batch), batch

    def extend(self, read_TF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A pass over positions whose vectors of the model are known.

        Returns: logits float32 (R, W) and vectors (R, D) of the rows to sample; views that live
        until the next pass.
        """
        self._whole.write(self._traced.read, read_TF)
        return self._pass(self._whole)

    def go_on(self, hidden_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A pass over guesses, which follow the head's own vectors; returns as `extend` does."""
        self._rest.write(self._traced.hidden, hidden_TD)
        return self._pass(self._rest)

    def _pass(self, program: Program) -> tuple[torch.Tensor, torch.Tensor]:
        run, batch = self._run, self._batch
        run.tokens, run.outputs, run.seqs = batch.num_tokens, batch.num_samples, batch.num_reqs
        program.run(run)
        rows = batch.num_samples
        return program.read(self._traced.logits, rows), program.read(self._traced.next_hidden, rows)


def _trace(head: DraftHead, columns: int, tracer: NativeTracer) -> _Traced:
    batch = SymbolicBatch(tracer)
    # A module's annotations speak of tensors; its ops take values as well.
    fuse: Callable[[TracedTensor], TracedTensor] = head.fuse
    read = tracer.input(columns, tracer.dtype)
    hidden = fuse(read)
    rest = tracer.next_segment()
    out, own = head.forward(hidden, batch)  # pyright: ignore[reportArgumentType]
    next_hidden = ops.take_rows(own, batch.sample_rows)
    taken = next_hidden if own is out else ops.take_rows(out, batch.sample_rows)
    logits = head.head(taken)
    assert isinstance(next_hidden, TracedTensor)
    assert isinstance(logits, TracedTensor)
    for value in (hidden, next_hidden, logits):
        tracer.pin(value)
    return _Traced(read, hidden, rest, next_hidden, logits)

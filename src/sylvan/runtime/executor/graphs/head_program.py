"""Records a draft head as a native step program.

Shapes: T rows, R rows whose logits are wanted, F columns that are read of the model, D hidden of
the head, W tokens that it can guess.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sylvan.kernels import ops
from sylvan.kernels.api import Value
from sylvan.kernels.native.library import Library
from sylvan.kernels.native.plan import place
from sylvan.kernels.native.program import Program
from sylvan.kernels.native.recorder import NativeRecorder, RecorderLimits
from sylvan.runtime.core.forward import BatchLimits, ForwardBatch
from sylvan.runtime.executor.graphs.pages import NativePool
from sylvan.runtime.executor.graphs.program import SymbolicBatch, bound
from sylvan.runtime.models.draft_heads import DraftHead


@dataclass(frozen=True, slots=True)
class _Recording:
    """Values of a recorded head that are written before, or read after, a pass."""

    read: Value
    hidden: Value
    start: int  # first op after `hidden`
    next_hidden: Value
    logits: Value


class HeadProgram:
    """Passes of a draft head over the buffers of one batch, a native call each.

    Args:
        head: With its weights, which recording packs and frees.
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
        """Record `head`.

        Raises:
            Unsupported: an op or shape has no kernel; the message names it.
        """
        assert isinstance(batch.kv, NativePool)
        limits: BatchLimits = batch.limits
        sizes = RecorderLimits(max_tokens=limits.max_tokens, max_outputs=limits.most_samples)
        parts = dtype, sizes, batch.kv.layers, library.constants
        _record(head, columns, NativeRecorder(*parts, rehearsal=True))
        recorder = NativeRecorder(*parts)
        self._found = found = _record(head, columns, recorder)
        placed = place(recorder.draft)
        self._whole = Program(library, placed)
        self._rest = Program(library, placed, found.start)
        self._run, self._batch = bound(batch), batch

    def extend(self, read_TF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A pass over positions whose vectors of the model are known.

        Returns: logits float32 (R, W) and vectors (R, D) of the rows to sample; views that live
        until the next pass.
        """
        self._whole.write(self._found.read, read_TF)
        return self._pass(self._whole)

    def go_on(self, hidden_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A pass over guesses, which follow the head's own vectors; returns as `extend` does."""
        self._rest.write(self._found.hidden, hidden_TD)
        return self._pass(self._rest)

    def _pass(self, program: Program) -> tuple[torch.Tensor, torch.Tensor]:
        run, batch = self._run, self._batch
        run.tokens, run.outputs, run.seqs = batch.num_tokens, batch.num_samples, batch.num_reqs
        program.run(run)
        rows = batch.num_samples
        return program.read(self._found.logits, rows), program.read(self._found.next_hidden, rows)


def _record(head: DraftHead, columns: int, recorder: NativeRecorder) -> _Recording:
    batch = SymbolicBatch(recorder)
    # A module's annotations speak of tensors; its ops take values as well.
    fuse: Callable[[Value], Value] = head.fuse
    read = recorder.input(columns, recorder.dtype)
    hidden = fuse(read)
    recorder.pin(hidden)
    start = len(recorder.draft.calls)
    out, own = head.forward(hidden, batch)  # pyright: ignore[reportArgumentType]
    next_hidden = ops.take_rows(own, batch.sample_rows)
    taken = next_hidden if own is out else ops.take_rows(out, batch.sample_rows)
    recorder.pin(next_hidden)
    logits = head.head(taken)
    for value in (next_hidden, logits):
        assert isinstance(value, Value)
        recorder.pin(value)
    return _Recording(read, hidden, start, next_hidden, logits)

"""Records a model's forward once as a native step program and replays it with one call a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from sylvan.kernels import ops
from sylvan.kernels.api import Value
from sylvan.kernels.native.binding import Kind, Run
from sylvan.kernels.native.library import Library
from sylvan.kernels.native.plan import place
from sylvan.kernels.native.program import Program
from sylvan.kernels.native.recorder import NativeRecorder, RecorderLimits
from sylvan.protocol.arrays import IntArray
from sylvan.runtime.core.forward import BatchLimits, ForwardBatch
from sylvan.runtime.executor.graphs.pages import NativePool
from sylvan.runtime.models.registry import Model


class SymbolicBatch:
    """What a model may read of its batch while it is recorded."""

    def __init__(self, recorder: NativeRecorder) -> None:
        self.input_ids_T = recorder.input_ids
        self.positions_T = recorder.positions
        self.sample_rows = recorder.sample_rows


@dataclass(frozen=True, slots=True)
class Recording:
    """Values of a recorded model that are read after a step."""

    hidden: Value
    logits: Value
    head_start: int  # first op of taking rows and the head


class ProgramRunner:
    """See `GraphRunner`. One native call a step, whatever the mix of prompts and decodes.

    Recording packs the weights, one at a time, and frees those of torch parameters; but a model
    that cannot be recorded is left as it was. The batches given to `run` must have buffers of
    `limits`, filled through `host`, and `pool` as their KV.
    """

    def __init__(
        self,
        model: Model,
        limits: BatchLimits,
        pool: NativePool,
        library: Library,
        *,
        dtype: torch.dtype,
        threads: int,
    ) -> None:
        """Record `model`.

        Raises:
            Unsupported: an op or shape has no kernel; the message names it.
        """
        sizes = RecorderLimits(max_tokens=limits.max_tokens, max_outputs=limits.max_reqs)
        parts = dtype, sizes, pool.layers, library.constants
        _record(model, NativeRecorder(*parts, rehearsal=True))
        recorder = NativeRecorder(*parts)
        recording = _record(model, recorder)
        library.dll.sylvan_threads(threads)
        placed = place(recorder.draft)
        self.weight_bytes = recorder.weight_bytes
        self.buffer_bytes = sum(placed.memory[i].nbytes for i in set(placed.home))
        self._program = Program(library, placed)
        self._head = Program(library, placed, recording.head_start)
        self._recording = recording
        self._rows = np.zeros(limits.max_reqs, np.int32)
        self._run = Run()
        self._bound: ForwardBatch | None = None
        self._num_tokens = 0

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        """See `GraphRunner.run`."""
        self._program.run(self._step(batch))
        self._num_tokens = batch.num_tokens
        return self._program.read(self._recording.logits, batch.num_samples)

    def logits(self, rows: IntArray) -> torch.Tensor:
        """See `GraphRunner.logits`."""
        assert len(rows) <= len(self._rows)
        self._rows[: len(rows)] = rows
        step = Run(outputs=len(rows), out_rows=self._rows.ctypes.data)
        self._head.run(step)
        return self._program.read(self._recording.logits, len(rows))

    def hidden(self, rows: IntArray) -> torch.Tensor:
        """See `GraphRunner.hidden`."""
        whole = self._program.read(self._recording.hidden, self._num_tokens)
        return whole[torch.from_numpy(rows).long()].float()

    def profile(self, batch: ForwardBatch) -> list[tuple[Kind, int]]:
        """Run a step and return each op with its nanoseconds."""
        return self._program.profile(self._step(batch))

    def _step(self, batch: ForwardBatch) -> Run:
        step = self._run
        if batch is not self._bound:
            self._bind(batch)
        step.tokens, step.outputs, step.seqs = batch.num_tokens, batch.num_samples, batch.num_reqs
        return step

    def _bind(self, batch: ForwardBatch) -> None:
        """Point the run-time arguments at the batch's buffers; they stay where they are."""
        host, step = batch.host, self._run
        step.table_stride = host.page_table.shape[1]
        step.ids = host.input_ids.ctypes.data
        step.positions = host.positions.ctypes.data
        step.slots = host.out_slots.ctypes.data
        step.row_start = host.q_starts.ctypes.data
        step.kv_len = host.kv_lens.ctypes.data
        step.table_row = host.req_slots.ctypes.data
        step.page_table = host.page_table.ctypes.data
        step.out_rows = host.sample_rows.ctypes.data
        self._bound = batch


def _record(model: Model, recorder: NativeRecorder) -> Recording:
    batch = SymbolicBatch(recorder)
    # A model's annotations speak of tensors; its ops take values as well.
    embed, forward, head = (getattr(model, name) for name in ("embed", "forward", "head"))
    hidden: Value = forward(embed(batch), batch)
    recorder.pin(hidden)
    head_start = len(recorder.draft.calls)
    logits: Value = head(ops.take_rows(hidden, batch.sample_rows))
    recorder.pin(logits)
    return Recording(hidden, logits, head_start)

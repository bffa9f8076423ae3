"""Records a model's forward once as a native step program and replays it with one call a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sylvan.kernels import ops
from sylvan.kernels.api import Value
from sylvan.kernels.native.binding import Kind, Run
from sylvan.kernels.native.copies import WeightCopy
from sylvan.kernels.native.library import Library
from sylvan.kernels.native.plan import place
from sylvan.kernels.native.program import Program
from sylvan.kernels.native.recorder import NativeRecorder, RecorderLimits
from sylvan.protocol.arrays import IntArray
from sylvan.runtime.core.forward import BatchLimits, ForwardBatch
from sylvan.runtime.executor.graphs.fused import NativeStep
from sylvan.runtime.executor.graphs.pages import NativePool
from sylvan.runtime.executor.outputs import layer_outputs
from sylvan.runtime.models.registry import Model
from sylvan.runtime.pool.none import NoPool
from sylvan.runtime.sampling.api import TokenSampler
from sylvan.runtime.sampling.native import NativeSampler
from sylvan.runtime.sampling.params import SamplingSlots


class SymbolicBatch:
    """What a model may read of its batch while it is recorded."""

    def __init__(self, recorder: NativeRecorder) -> None:
        self.input_ids_T = recorder.input_ids
        self.positions_T = recorder.positions
        self.sample_rows = recorder.sample_rows
        self.token_types_T = recorder.token_types


@dataclass(frozen=True, slots=True)
class Recording:
    """Values of a recorded model that are read after a step."""

    hidden: Value
    taken: Value  # rows of `hidden`, for the head
    logits: Value
    head_start: int  # first op of taking rows, which the head follows
    layers: Mapping[int, Value]  # outputs of layers that are kept


class ProgramRunner:
    """See `ModelRunner`. One native call a step, whatever the mix of prompts and decodes.

    Recording packs the weights, one at a time, and frees those of torch parameters; but a model
    that cannot be recorded is left as it was. The batches given to `run` must have buffers of
    `limits`, filled through `host`, and `pool` as their KV.

    Attributes:
        copies: What it keeps of the model's weights.
        buffers: Memory in which steps compute; nothing in it outlives a step.
    """

    verifies_drafts = True

    def __init__(  # noqa: PLR0913 - all that a program is made from
        self,
        model: Model,
        limits: BatchLimits,
        pool: NativePool | NoPool,
        library: Library,
        *,
        dtype: torch.dtype,
        threads: int,
        hidden_layers: Sequence[int] = (),
    ) -> None:
        """Record `model`, keeping the outputs of `hidden_layers`.

        Raises:
            Unsupported: an op or shape has no kernel; the message names it.
        """
        sizes = RecorderLimits(max_tokens=limits.max_tokens, max_outputs=limits.most_samples)
        parts = dtype, sizes, pool.layers, library.constants
        _record(model, NativeRecorder(*parts, rehearsal=True), hidden_layers)
        recorder = NativeRecorder(*parts)
        recording = _record(model, recorder, hidden_layers)
        library.dll.sylvan_threads(threads)
        placed = place(recorder.draft)
        self.weight_bytes = recorder.weight_bytes
        self.buffer_bytes = sum(placed.memory[i].nbytes for i in set(placed.home))
        self.copies: Sequence[WeightCopy] = recorder.copies
        constants = len(recorder.draft.constants)
        self.buffers = [torch.from_numpy(part) for part in placed.memory[constants:]]
        self._program = Program(library, placed)
        self._rows_and_head = Program(library, placed, recording.head_start)
        self._head = Program(library, placed, recording.head_start + 1)
        self._recording = recording
        self._rows = np.zeros(limits.most_samples, np.int32)
        self._run = Run()
        self._batch: ForwardBatch | None = None

    def bucket(self, tokens: int, requests: int) -> None:
        """See `ModelRunner.bucket`; programs take steps of any size."""

    def run(self, batch: ForwardBatch, *, graph: bool = False) -> torch.Tensor:
        """See `ModelRunner.run`."""
        self._program.run(self._step(batch))
        return self._program.read(self._recording.logits, batch.num_samples)

    def fuse(
        self,
        batch: ForwardBatch,
        sampler: TokenSampler,
        last_token: IntArray,
        params: SamplingSlots,
    ) -> NativeStep | None:
        """See `ModelRunner.fuse`."""
        if not isinstance(sampler, NativeSampler):
            return None
        whole = self._program.read(self._recording.logits, batch.limits.most_samples)
        return NativeStep(self._program, bound(batch), batch, whole, last_token, params)

    def logits(self, rows: IntArray | torch.Tensor) -> torch.Tensor:
        """See `ModelRunner.logits`."""
        assert len(rows) <= len(self._rows)
        self._rows[: len(rows)] = np.asarray(rows)
        step = Run(outputs=len(rows), out_rows=self._rows.ctypes.data)
        self._rows_and_head.run(step)
        return self._program.read(self._recording.logits, len(rows))

    def hidden(self, rows: IntArray | torch.Tensor) -> torch.Tensor:
        """See `ModelRunner.hidden`."""
        return self._take(self._recording.hidden, rows).float()

    def layer_hidden(self, layer: int, rows: IntArray | torch.Tensor) -> torch.Tensor:
        """See `ModelRunner.layer_hidden`."""
        return self._take(self._recording.layers[layer], rows)

    def head(self, vectors_RD: torch.Tensor) -> torch.Tensor:
        """See `ModelRunner.head`."""
        self._program.write(self._recording.taken, vectors_RD)
        self._head.run(Run(outputs=len(vectors_RD)))
        found = self._program.read(self._recording.logits, len(vectors_RD))
        return found.to(torch.float32, copy=True)

    def profile(self, batch: ForwardBatch) -> list[tuple[Kind, int]]:
        """Run a step and return each op with its nanoseconds."""
        return self._program.profile(self._step(batch))

    def _take(self, value: Value, rows: IntArray | torch.Tensor) -> torch.Tensor:
        whole = self._program.read(value, int(rows.max()) + 1)
        return whole[torch.as_tensor(rows).long()]

    def _step(self, batch: ForwardBatch) -> Run:
        if batch is not self._batch:
            self._batch, self._run = batch, bound(batch)
        step = self._run
        step.tokens, step.outputs, step.seqs = batch.num_tokens, batch.num_samples, batch.num_reqs
        return step


def bound(batch: ForwardBatch) -> Run:
    """Run-time arguments that point at the batch's buffers; these stay where they are."""
    host = batch.host
    return Run(
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


def _record(model: Model, recorder: NativeRecorder, hidden_layers: Sequence[int] = ()) -> Recording:
    batch = SymbolicBatch(recorder)
    # A model's annotations speak of tensors; its ops take values as well.
    embed, forward, head = (getattr(model, name) for name in ("embed", "forward", "head"))
    with layer_outputs(model, hidden_layers) as layers:
        hidden: Value = forward(embed(batch), batch)
    for value in layers.values():
        recorder.pin(value)
    recorder.pin(hidden)
    head_start = len(recorder.draft.calls)
    taken = ops.take_rows(hidden, batch.sample_rows)
    recorder.pin(taken)
    logits: Value = head(taken)
    recorder.pin(logits)
    return Recording(hidden, taken, logits, head_start, layers)

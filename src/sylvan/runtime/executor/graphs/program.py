"""Traces a model's forward once, compiles a step program, and runs it by one call per step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sylvan.kernels import ops
from sylvan.kernels.api import TracedTensor, Unsupported
from sylvan.kernels.memory import Bytes
from sylvan.kernels.native.binding import StepRun
from sylvan.kernels.native.builder import padded
from sylvan.kernels.native.compile import compile_graph
from sylvan.kernels.native.copies import VectorCopy, WeightCopy
from sylvan.kernels.native.cost import OpCost, program_costs, read_rate
from sylvan.kernels.native.graph import ProgramLimits
from sylvan.kernels.native.image import ProgramImage, image_of
from sylvan.kernels.native.library import Library
from sylvan.kernels.native.program import Program
from sylvan.kernels.native.schema import Op
from sylvan.kernels.native.tracer import NativeTracer
from sylvan.kernels.native.weight_file import PackedWeightFile
from sylvan.protocol.arrays import IntArray
from sylvan.runtime.core.forward import BatchLimits, ForwardBatch
from sylvan.runtime.core.step import EMBEDDINGS
from sylvan.runtime.executor.graphs.arguments import run_arguments
from sylvan.runtime.executor.graphs.fused import ProgramStep
from sylvan.runtime.executor.graphs.pages import NativePool
from sylvan.runtime.executor.graphs.partial import (
    SymbolicBatch,
    check_host_modules,
    finish_host_modules,
    host_modules,
    names_of,
    weight_bytes,
)
from sylvan.runtime.executor.graphs.split import SplitPrompt
from sylvan.runtime.executor.graphs.step_states import StepStates
from sylvan.runtime.executor.outputs import keep_stream, layer_outputs
from sylvan.runtime.executor.profiling import MeasuredSteps
from sylvan.runtime.layers.stage import WHOLE_MODEL, Stage
from sylvan.runtime.models.registry import Model
from sylvan.runtime.pool.none import NoPool
from sylvan.runtime.sampling.api import TokenSampler
from sylvan.runtime.sampling.native import NativeSampler
from sylvan.runtime.sampling.params import SamplingSlots


@dataclass(frozen=True, slots=True)
class Traced:
    """Values of a traced model that are written during a step or read after it."""

    hidden: TracedTensor
    taken: TracedTensor  # the rows of `hidden` that the head reads
    logits: TracedTensor
    edits: Sequence[tuple[int, int, TracedTensor]]  # see `SymbolicBatch`
    take: int  # the segment that selects these rows; the head is the next one
    layers: Mapping[int, TracedTensor]  # kept layer outputs
    given: TracedTensor | None = None  # vectors that replace the embeddings of rows
    stream: TracedTensor | None = None  # input of the next pipeline stage


class ProgramRunner:
    """Implements `ModelRunner` by a step program: one native call per step of any size.

    Compiling packs the weights one at a time and frees the torch parameters; a model that cannot be
    traced stays unchanged. Untraceable modules of blocks are called back through PyTorch. Batches
    given to `run` must have buffers of `limits`, filled through `host`, and `pool` as their KV.

    Attributes:
        copies: Packed copies of the model's weights.
        costs: Bytes that each op reads and writes.
        host_calls: Names of the modules that PyTorch computes; empty: none.
        buffers: Scratch memory of a step; nothing in it outlives the step.
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
        edits_inputs: bool = False,
        kept: PackedWeightFile | None = None,
        stage: Stage = WHOLE_MODEL,
        states: Sequence[torch.Tensor] = (),
    ) -> None:
        """Trace and compile `model`, keeping the outputs of `hidden_layers`.

        With `edits_inputs`, vectors may replace token embeddings (`ForwardBatch.input_embeds`).
        Weights found in `kept` are not packed again; all others are added to it. `stage` says which
        layers `model` has, `states` are all slots of each of its recurrent states.

        Raises:
            Unsupported: an op or shape has no kernel; the message names it.
        """
        make = tracers(limits, pool, library, dtype, states)
        tracer = make()
        with host_modules(model, make()) as called:
            traced = trace(model, tracer, hidden_layers, edits_inputs=edits_inputs, stage=stage)
        check_host_modules(called)
        sizes = [(type(module).__name__, weight_bytes(module)) for module in called]
        library.dll.sylvan_threads(threads)
        layout = compile_graph(tracer.graph, kept)
        if kept is not None:
            kept.number_arrays()
        self.weight_bytes = layout.weight_bytes
        self.buffer_bytes = sum(part.nbytes for part in layout.buffers)
        self.copies: Sequence[WeightCopy] = layout.copies
        self.costs: Sequence[OpCost] = program_costs(layout, sizes)
        self.host_calls = names_of(called)
        if called:
            self.copies = [*layout.copies, *finish_host_modules(called, dtype, threads)]
        self.buffers = [torch.from_numpy(part) for part in layout.buffers]
        self._layout, self._library = layout, library
        self._program = Program(library, layout)
        starts = [0, *(segment for _, segment, _ in traced.edits)]
        stops = [*starts[1:], None]
        self._parts = [Program(library, layout, *cut) for cut in zip(starts, stops, strict=True)]
        self._rows_and_head = Program(library, layout, traced.take)
        self._head = Program(library, layout, traced.take + 1)
        self._traced = traced
        self._rows = np.zeros(limits.max_sampled_rows, np.int32)
        self._run = StepRun()
        self._batch: ForwardBatch | None = None
        self._states = StepStates(limits) if states else None

    def bucket(self, tokens: int, requests: int) -> None:
        """Return None: programs accept steps of any size without padding."""

    def run(self, batch: ForwardBatch, *, graph: bool = False) -> torch.Tensor:
        if self._program.calls_host:
            batch.plan_attention()
        if batch.input_embeds:
            self._run_edited(batch)
        else:
            self._program.run(self._step(batch), batch)
        return self._program.read(self._traced.logits, batch.num_samples)

    def _run_edited(self, batch: ForwardBatch) -> None:
        """Run a step in which vectors replace rows or are added to them."""
        edits = self._traced.edits
        assert edits, "the program was compiled without edits_inputs"
        for program, (layer, _, value) in zip(self._parts, edits, strict=False):
            program.run(self._step(batch), batch)
            rows_TD = program.read(value, batch.num_tokens)
            for part in batch.input_embeds:
                if part.layer == layer:
                    rows = slice(part.row, part.row + len(part.vectors))
                    vectors = torch.from_numpy(part.vectors)
                    rows_TD[rows] = vectors if layer == EMBEDDINGS else rows_TD[rows] + vectors
        self._parts[-1].run(self._step(batch), batch)

    def fuse(
        self,
        batch: ForwardBatch,
        sampler: TokenSampler,
        last_token: IntArray,
        params: SamplingSlots,
    ) -> ProgramStep | None:
        if not isinstance(sampler, NativeSampler) or self._program.calls_host:
            return None
        whole = self._program.read(self._traced.logits, batch.limits.max_sampled_rows)
        return ProgramStep(self._program, batch, whole, last_token, params, self._states)

    def put_stream(self, stream_TD: torch.Tensor) -> None:
        assert self._traced.given is not None
        self._program.write(self._traced.given, stream_TD)

    def stream(self, num_rows: int) -> torch.Tensor:
        assert self._traced.stream is not None
        return self._program.read(self._traced.stream, num_rows)

    def measure(self, *, on: bool) -> MeasuredSteps:
        found = self._program.measure(on=on)
        rate = None if on else read_rate(self._library)
        times = [ns for _, ns in found]
        return MeasuredSteps(self._program.num_measured, self.costs[: len(times)], times, rate)

    def logits(self, rows: IntArray | torch.Tensor) -> torch.Tensor:
        assert len(rows) <= len(self._rows)
        self._rows[: len(rows)] = np.asarray(rows)
        step = StepRun(outputs=len(rows), out_rows=self._rows.ctypes.data)
        self._rows_and_head.run(step)
        return self._program.read(self._traced.logits, len(rows))

    def hidden(self, rows: IntArray | torch.Tensor) -> torch.Tensor:
        return self._take(self._traced.hidden, rows).to(torch.float32, copy=True)

    def layer_hidden(self, layer: int, rows: IntArray | torch.Tensor) -> torch.Tensor:
        return self._take(self._traced.layers[layer], rows)

    def head(self, vectors_RD: torch.Tensor) -> torch.Tensor:
        self._program.write(self._traced.taken, vectors_RD)
        self._head.run(StepRun(outputs=len(vectors_RD)))
        found = self._program.read(self._traced.logits, len(vectors_RD))
        return found.to(torch.float32, copy=True)

    def constant(self, tensor: torch.Tensor) -> torch.Tensor:
        found = (c for c in self.copies if isinstance(c, VectorCopy) and c.source is tensor)
        copy = next(found, None)
        return tensor if copy is None else copy.numbers().view(tensor.shape)

    def image(self, pages: Bytes, weights: Mapping[int, int]) -> ProgramImage:
        """Contents of a program file; see `image_of`. Call it before the first step."""
        layout, logits = self._layout, self._traced.logits
        assert not self.host_calls
        return image_of(
            layout.records,
            layout.memory,
            (layout.home[logits.id], padded(logits.cols)),
            buffers={entry for entry in layout.home if entry >= 0},
            pages=pages,
            weights=weights,
        )

    def profile(self, batch: ForwardBatch) -> list[tuple[Op, int]]:
        """Run a step and return each op with its nanoseconds."""
        return self._program.profile(self._step(batch), batch)

    def split(self, limits: BatchLimits, page_size: int) -> SplitPrompt:
        """Return a `SplitPrompt`, which computes prompts op by op between steps.

        Raises:
            Unsupported: PyTorch computes some modules of the model, or it has recurrent states.
        """
        if self._states is not None:
            raise Unsupported("recurrent states of prompts between steps")
        if self.host_calls:
            raise Unsupported(f"PyTorch computes {self.host_calls}")
        return SplitPrompt(self._library, self._layout, self._traced.take, limits, page_size)

    def _take(self, value: TracedTensor, rows: IntArray | torch.Tensor) -> torch.Tensor:
        first, last = int(rows[0]), int(rows.max())
        whole = self._program.read(value, last + 1)
        if last - first + 1 == len(rows) and (rows[1:] > rows[:-1]).all():
            return whole[first:]  # a view: the rows are usually contiguous
        return whole[torch.as_tensor(rows).long()]

    def _step(self, batch: ForwardBatch) -> StepRun:
        if batch is not self._batch:
            self._batch, self._run = batch, run_arguments(batch.host)
        step = self._run
        step.tokens, step.outputs, step.seqs = batch.num_tokens, batch.num_samples, batch.num_reqs
        if self._states is not None and batch.state_work is not None:
            self._states.bind(step, batch.state_work)
        step.row_ends = None if batch.row_ends is None else batch.row_ends.ctypes.data
        return step


def tracers(
    limits: BatchLimits,
    pool: NativePool | NoPool,
    library: Library,
    dtype: torch.dtype,
    states: Sequence[torch.Tensor] = (),
) -> Callable[[], NativeTracer]:
    """Factory of tracers for a model of these rows, pages and recurrent states."""
    most = ProgramLimits(max_tokens=limits.max_tokens, max_outputs=limits.max_sampled_rows)
    return lambda: NativeTracer(dtype, most, pool.layers, library.constants, states=states)


def host_calls(model: Model, make: Callable[[], NativeTracer], stage: Stage = WHOLE_MODEL) -> str:
    """Names of the modules that a program would leave to PyTorch; has no side effects.

    Raises:
        Unsupported: no program is possible.
    """
    with host_modules(model, make()) as called:
        trace(model, make(), stage=stage)
    return names_of(called)


def trace(
    model: Model,
    tracer: NativeTracer,
    hidden_layers: Sequence[int] = (),
    *,
    edits_inputs: bool = False,
    stage: Stage = WHOLE_MODEL,
) -> Traced:
    """Trace embedding, layers and head of a model, keeping the outputs of `hidden_layers`.

    With `edits_inputs` the embeddings are kept as well, in a segment of their own. A `stage` after
    the first starts from rows written by the caller.

    Raises:
        Unsupported: an op or shape has no kernel; the message names it.
    """
    batch = SymbolicBatch(tracer)
    # A model's annotations say tensors; its ops also take traced values.
    embed, forward, head = (getattr(model, name) for name in ("embed", "forward", "head"))
    given = None if stage.is_first else tracer.input(stage.dim, "f32")
    if given is not None:
        tracer.pin(given)
    streams: dict[int, TracedTensor] = {}
    with layer_outputs(model, hidden_layers) as layers, contextlib.ExitStack() as hooks:
        if stage.last_layer is not None:
            hooks.callback(keep_stream(model, stage.last_layer, streams).remove)
        embedded: TracedTensor = embed(batch) if given is None else given
        if edits_inputs:
            embedded = batch.edited(EMBEDDINGS, embedded)
        hidden: TracedTensor = forward(embedded, batch)
    for value in (hidden, *layers.values(), *streams.values()):
        tracer.pin(value)
    take = tracer.next_segment()
    taken = ops.take_rows(hidden, batch.sample_rows)
    tracer.pin(taken)
    tracer.next_segment()
    logits: TracedTensor = head(taken)
    tracer.pin(logits)
    stream = next(iter(streams.values()), None)
    return Traced(hidden, taken, logits, batch.edits, take, layers, given, stream)

"""Runs a lowered program on the executor's batches, one compiled call per step.

Shapes: T rows of tokens, S sampled rows, R rows, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sylvan.protocol.arrays import IntArray
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.core.step import EMBEDDINGS, StepPlan
from sylvan.runtime.executor.inputs import fill_step
from sylvan.runtime.executor.results import no_valid_token
from sylvan.runtime.executor.xla.adapters import XlaAdapters
from sylvan.runtime.executor.xla.compilations import counted_compilations
from sylvan.runtime.executor.xla.functions import DRAW_TYPES, HEAD_ROWS, Edits, StepFunctions
from sylvan.runtime.executor.xla.inputs import GroupRows, RowInputs, divide, pack, sizes_of
from sylvan.runtime.executor.xla.items import XlaItems
from sylvan.runtime.executor.xla.rotary import RotaryTables
from sylvan.runtime.executor.xla.sizes import BucketUse, StepBucket, StepBuckets
from sylvan.runtime.sampling.api import TokenSampler
from sylvan.runtime.sampling.constraints import Masks
from sylvan.runtime.sampling.output import SampleOutput
from sylvan.runtime.sampling.params import NO_TOP_K, SamplingSlots
from sylvan.runtime.sampling.sampler import Sampler


@dataclass(frozen=True, slots=True)
class StepExtras:
    """Optional inputs of a model's steps besides tokens.

    Attributes:
        adapters: Adapters of the model's layers.
        edits: Layers whose outputs a step may change, in order (`EMBEDDINGS`: embeddings).
        tables: Rotary tables with rows for image positions; None if the model has none.
        items: Encoded items of cross-attention; None if the model has none.
    """

    adapters: XlaAdapters
    edits: Sequence[int] = ()
    tables: RotaryTables | None = None
    items: XlaItems | None = None


class XlaRunner:
    """Implements `ModelRunner` by one call of a compiled function per step.

    Args:
        functions: Functions compiled for all buckets.
        buckets: Buckets for the executor's limits.
        layers: Layers whose outputs are kept.
        loads: Counters of rows per expert, int64 (E,), in the order of `Outputs.loads`.
        use: Counts steps and their padding.
        extras: Optional inputs besides tokens.
    """

    verifies_drafts = True

    def __init__(
        self,
        functions: StepFunctions,
        buckets: StepBuckets,
        layers: Sequence[int],
        loads: Sequence[np.ndarray],
        use: BucketUse,
        extras: StepExtras,
    ) -> None:
        self._functions, self._buckets = functions, buckets
        self._adapters, self._edits, self._tables = extras.adapters, extras.edits, extras.tables
        self._items = extras.items
        self._layers = {layer: number for number, layer in enumerate(layers)}
        self._loads, self.use = loads, use
        self._outputs = None
        self._row_places = self._sample_places = np.zeros(0, np.int32)
        self._host: dict[int, np.ndarray] = {}  # outputs copied to the host, by layer; -1: hidden

    def bucket(self, tokens: int, requests: int) -> None:
        """Return None: the batch itself is not padded, its packed copy is."""

    def run(self, batch: ForwardBatch, *, graph: bool = False) -> torch.Tensor:
        self.compute(batch)
        return self.read_logits(batch.num_samples)

    def compute(self, batch: ForwardBatch) -> None:
        """Start a step and leave its results on the devices."""
        with counted_compilations(self.use):
            self._compute(batch)

    def _compute(self, batch: ForwardBatch) -> None:
        kinds = self._functions.kinds
        parts = divide(batch, kinds.shards)
        prompts = bool(batch.input_embeds) or not all(part.decodes for part in parts)
        bucket = self._buckets.of(sizes_of(batch, parts), prompts=prompts)
        edits = self._edited(batch, bucket) if batch.input_embeds else ()
        self.use.count(batch.num_tokens, bucket, kinds.shards)
        self._host.clear()
        self._place(parts, bucket)
        if self._tables is not None and batch.rotary_positions is not None:
            self._tables.copy()
        also = self._row_inputs(batch)
        vectors = np.stack([pack(batch, bucket, kinds, part, also) for part in parts])
        found = self._outputs = self._functions.step(bucket, vectors, edits)
        for counts, added in zip(self._loads, found.loads, strict=True):
            np.add(counts, np.asarray(added), out=counts)

    def _place(self, parts: Sequence[GroupRows], bucket: StepBucket) -> None:
        """Record where the step's rows and sampled rows lie among the padded ones."""
        self._row_places = _places([part.rows for part in parts], bucket.rows)
        self._sample_places = _places([part.samples for part in parts], bucket.samples)

    def _row_inputs(self, batch: ForwardBatch) -> RowInputs:
        adapters = items = None
        if self._adapters.rows:
            adapters = self._adapters.slots_of(np.arange(batch.num_tokens, dtype=np.int32))
        if self._items is not None:
            items = self._items.place(batch.cross, batch.num_tokens)
        return RowInputs(adapters=adapters, items=items)

    def _edited(self, batch: ForwardBatch, bucket: StepBucket) -> Edits:
        """Pack the vectors that replace embeddings, or are added to the outputs of layers."""
        assert self._edits, "the program was lowered without edits"
        size = bucket.rows, batch.input_embeds[0].vectors.shape[1]
        found = {
            layer: (np.zeros(size, np.float32), np.zeros(size[0], bool)) for layer in self._edits
        }
        for part in batch.input_embeds:
            vectors, there = found[part.layer]
            rows = slice(part.row, part.row + len(part.vectors))
            if part.layer == EMBEDDINGS:
                vectors[rows] = part.vectors
            else:
                vectors[rows] += part.vectors
            there[rows] = True
        return tuple(found.values())

    def read_logits(self, count: int) -> torch.Tensor:
        """Logits of the step's sampled rows, float32 (S, V); a copy."""
        assert self._outputs is not None
        assert count == len(self._sample_places)
        return torch.from_numpy(np.asarray(self._outputs.logits)[self._sample_places])

    def draw(self, rows: dict[str, np.ndarray] | None, count: int) -> IntArray:
        """Ids of sampled rows, int32 (S,); -1 if no token is valid. `rows` None: all are greedy."""
        assert self._outputs is not None
        assert count == len(self._sample_places)
        logits, padded = self._outputs.logits, None
        if rows is not None:
            places = self._sample_places
            padded = {name: _padded(x, places, logits.shape[0]) for name, x in rows.items()}
        with counted_compilations(self.use):
            return self._functions.draw(logits, padded)[self._sample_places]

    def fuse(
        self,
        batch: ForwardBatch,
        sampler: TokenSampler,
        last_token: IntArray,
        params: SamplingSlots,
    ) -> XlaStep | None:
        if isinstance(sampler, Sampler) and sampler.has_custom:
            return None
        return XlaStep(self, batch, last_token, params)

    def logits(self, rows: IntArray | torch.Tensor) -> torch.Tensor:
        numbers = np.asarray(rows)
        slots = self._adapters.slots_of(numbers) if self._adapters.rows else None
        return self._heads(self._read(-1)[numbers], slots)

    def hidden(self, rows: IntArray | torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(self._read(-1)[np.asarray(rows)])

    def layer_hidden(self, layer: int, rows: IntArray | torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(self._read(self._layers[layer])[np.asarray(rows)])

    def head(self, vectors_RD: torch.Tensor) -> torch.Tensor:
        return self._heads(vectors_RD.float().numpy())

    def constant(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def _heads(self, vectors_RD: np.ndarray, slots_R: IntArray | None = None) -> torch.Tensor:
        parts: list[np.ndarray] = []
        for start in range(0, len(vectors_RD), HEAD_ROWS):
            some = slice(start, start + HEAD_ROWS)
            slots = None if slots_R is None else slots_R[some]
            with counted_compilations(self.use):
                parts.append(self._functions.head(vectors_RD[some], slots))
        return torch.from_numpy(np.concatenate(parts))

    def _read(self, number: int) -> np.ndarray:
        """Read the outputs of a layer, or the hidden vectors (-1), of the step: float32 (T, D)."""
        assert self._outputs is not None
        if number not in self._host:
            found = self._outputs.hidden if number < 0 else self._outputs.layers[number]
            self._host[number] = np.asarray(found)[self._row_places]
        return self._host[number]


def _places(numbers: Sequence[IntArray], size: int) -> IntArray:
    """Return the place of each number if the groups are concatenated, each padded to `size`."""
    found = np.zeros(sum(map(len, numbers)), np.int32)
    for group, own in enumerate(numbers):
        found[own] = np.arange(len(own), dtype=np.int32) + group * size
    return found


def _padded(x: np.ndarray, places: IntArray, count: int) -> np.ndarray:
    """Return `count` rows: x at its places, and its first row elsewhere."""
    found = np.repeat(x[:1], count)
    found[places] = x
    return found


class XlaStep:
    """Implements `FusedStep`: samples on the device unless something edits the logits.

    Args:
        runner: The model's runner.
        batch: Buffers of all steps.
        last_token: The newest token of each request slot.
        params: Sampling parameters of the request slots.
    """

    def __init__(
        self, runner: XlaRunner, batch: ForwardBatch, last_token: IntArray, params: SamplingSlots
    ) -> None:
        self._runner, self._batch, self._params = runner, batch, params
        self._arrays, self._last_token = vars(batch.host), last_token

    def run(self, plan: StepPlan, *, draw: bool, masks: Masks | None = None) -> SampleOutput | None:
        self._fill(plan)
        self._runner.compute(self._batch)
        slots = plan.sample_slots
        if not draw or masks is not None or self._edits(plan, slots):
            return None
        rows = None if self._params.greedy[slots].all() else self._rows(plan, slots)
        ids = self._runner.draw(rows, len(slots)) if len(slots) else np.zeros(0, np.int32)
        errors = no_valid_token(ids.tolist())
        ids = np.maximum(ids, 0)
        self._last_token[slots] = ids
        return SampleOutput(ids, {}, errors)

    def logits(self) -> torch.Tensor:
        return self._runner.read_logits(self._batch.num_samples)

    def _fill(self, plan: StepPlan) -> None:
        host, batch = self._batch.host, self._batch
        shifts = host.position_shifts
        fill_step(self._arrays, plan, host.page_tables, batch.kv.page_size, shifts=shifts)
        ids = host.input_ids[: plan.num_tokens]
        ids[plan.in_flight] = self._last_token[plan.in_flight_slots]
        # An id outside the vocabulary fails its request at the next sample.
        np.clip(ids, 0, self._params.vocab_size - 1, out=ids)
        batch.ready(plan.num_tokens, plan.num_slices, plan.num_samples)

    def _edits(self, plan: StepPlan, slots: IntArray) -> bool:
        """Whether any row has edited logits, or returns log probabilities."""
        p = self._params
        some = p.has_penalty[slots] | p.has_bias[slots] | p.has_logprobs[slots]
        return bool(some.any() or (plan.sample_positions < p.min_position[slots]).any())

    def _rows(self, plan: StepPlan, slots: IntArray) -> dict[str, np.ndarray]:
        p, positions = self._params, plan.sample_positions
        found = {
            name: getattr(p, name)[slots].astype(kind)
            for name, kind in DRAW_TYPES.items()
            if name not in ("top_k", "position")
        }
        top_k = np.minimum(p.top_k[slots], NO_TOP_K).astype(np.int32)
        return found | {"top_k": top_k, "position": positions.astype(np.int64)}

"""Worker half: encodes items concurrently with steps, and inserts embeddings into rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import ClassVar

import msgspec
import numpy as np
import torch
from torch import nn

from sylvan.kernels.api import Rope
from sylvan.media.precomputed import VECTORS
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.core.forward import CrossAttentionRecorder, CrossMemory, CrossSpan
from sylvan.runtime.core.step import EMBEDDINGS, InputEmbeds, Join
from sylvan.runtime.executor.capability import CapabilityWorker, Report, StepContext
from sylvan.runtime.executor.failures import FAILURES
from sylvan.runtime.executor.options import ModelContext
from sylvan.runtime.features.multimodal.alignment import Alignment
from sylvan.runtime.features.multimodal.control import Multimodal
from sylvan.runtime.features.multimodal.encoder import MediaEncoder
from sylvan.runtime.features.multimodal.positions import prompt_positions
from sylvan.runtime.features.multimodal.work import (
    CrossRows,
    EncodeJob,
    MediaReport,
    MediaWork,
    RowPositions,
)
from sylvan.runtime.layers.attention import PagedAttention
from sylvan.utils.threads import lower_priority

_IDLE_WAIT_S = 0.02  # a step without slices delays nothing else


class MultimodalWorker(CapabilityWorker):
    """Owns the encoder and its outputs.

    Args:
        context: The model, as this worker half uses it.
        encoder: The encoder.
    """

    name: ClassVar = Multimodal.name
    edits_inputs: ClassVar = True
    in_layers: ClassVar = True

    def __init__(self, context: ModelContext, encoder: MediaEncoder) -> None:
        self._model_context, self._encoder = context, encoder
        self._is_first = context.build.mesh.stage.is_first  # other stages get rows, not tokens
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="encode", initializer=lower_priority)
        self._running: dict[Future[Sequence[np.ndarray]], EncodeJob] = {}
        self._vectors: dict[bytes, Future[Sequence[np.ndarray]]] = {}
        assert context.config.media is not None
        self._layers = (EMBEDDINGS, *context.config.media.edited_layers)
        self._scale = context.config.media.vector_scale
        self._dual_width = context.config.media.dual_encoder
        self._width = self._dual_width or context.config.hidden_size
        self._cross: dict[bytes, CrossMemory] = {}
        self._alignment = (
            Alignment(context.model_dir, context.config) if context.config.media.one else None
        )
        self._recorders: dict[int, CrossAttentionRecorder] = {}  # of unfinished prompts, by slot
        self._ropes: list[Rope] = []
        self._axes = torch.tensor(
            context.config.rope_axes, dtype=torch.int64, device=context.device
        )

    def adapt(self, model: nn.Module) -> None:
        """Find the rotary tables, if rows need positions of their own."""
        if not len(self._axes):
            return
        layers = (module for module in model.modules() if isinstance(module, PagedAttention))
        self._ropes = list({id(r): r for layer in layers if (r := layer.rope)}.values())
        for rope in self._ropes:
            if rope.cos_sin.shape[1] != 2 * len(self._axes):
                raise ConfigError(
                    f"config.json: {len(self._axes)} angles have an axis, rotary tables have "
                    f"{rope.cos_sin.shape[1] // 2}"
                )

    def join(self, join: Join) -> None:
        """Set the position shift of later tokens, which continue after the last grid."""
        request, shift = join.request, 0
        if len(self._axes) and request.media:
            shift = prompt_positions(request.input_ids, request.media).shift
        self._model_context.position_shifts()[join.slot] = shift

    def prepare(self, work: MediaWork) -> None:
        """Drop embeddings, and start encoding."""
        for key in work.drop:
            self._vectors.pop(key, None)
        for job in work.encode:
            made = self._pool.submit(self._encode, job)
            self._running[made] = job
            self._vectors[job.key] = made

    def before_forward(self, step: StepContext, work: MediaWork) -> None:
        """Insert this step's embeddings and positions."""
        if self._dual_width:
            step.items.update({part.row: self._encoded(part.key)[0][0] for part in work.rows})
            return
        batch = step.batch
        step.may_use_graph &= not (work.rows or work.cross)
        batch.input_embeds = tuple(
            InputEmbeds(part.row, vectors[part.first : part.first + part.count], layer)
            for part in (work.rows if self._is_first else ())
            for layer, vectors in zip(self._layers, self._encoded(part.key), strict=False)
        )
        if work.positions is not None:
            batch.rotary_positions = self._table_positions(step, work.positions)
        media = self._model_context.config.media
        if media is not None and media.cross:
            batch.cross = self._spans(work.cross, self._recorders_of(step, work))
        if work.ends is not None:
            if not batch.attention.caps.row_ends:
                raise ValueError("attention.backend cannot let images see their later tokens")
            batch.row_ends = np.ascontiguousarray(work.ends)

    def leave(self, slot: int) -> None:
        """Drop the recorded attention weights of a request."""
        self._recorders.pop(slot, None)

    def after_forward(self, step: StepContext, work: MediaWork) -> Report:
        """Report finished encodings, and the attention weights of prompts to align."""
        weights: dict[int, np.ndarray] = {}
        for part in work.aligned:
            if part.done and self._alignment is not None:
                recorder = self._recorders.pop(int(step.plan.slots[part.index]))
                with step.guard(part.index, "the text cannot be aligned"):
                    weights[part.index] = self._alignment.weights(recorder)
        if not weights:
            return self._report
        return lambda: msgspec.structs.replace(self._report() or MediaReport(), weights=weights)

    def idle_step(self, work: MediaWork) -> Report:
        """Report when the step has nothing else to do."""
        if self._running:
            wait_for(self._running, timeout=_IDLE_WAIT_S, return_when="FIRST_COMPLETED")
        return self._report

    def close(self) -> None:
        """Stop the thread."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    # ---- inside

    def _recorders_of(
        self, step: StepContext, work: MediaWork
    ) -> dict[int, CrossAttentionRecorder]:
        """Return the recorders of attention weights, by the first row of their slice."""
        found: dict[int, CrossAttentionRecorder] = {}
        for part in work.aligned:
            if self._alignment is None:
                raise ValueError("no layer of this model attends to audio")
            slot = int(step.plan.slots[part.index])
            if part.first:
                self._recorders[slot] = self._alignment.recorder(part.most)
            found[part.row] = self._recorders[slot]
        return found

    def _spans(
        self, parts: Sequence[CrossRows], recorders: Mapping[int, CrossAttentionRecorder]
    ) -> tuple[CrossSpan, ...]:
        """Return what rows cross-attend to; drop cached KV that none uses."""
        known = self._cross
        keys = dict.fromkeys(key for part in parts for key in part.keys)
        self._cross = {
            key: known.get(key) or CrossMemory(self._on_device(self._encoded(key)[0]))
            for key in keys
        }
        return tuple(
            CrossSpan(
                slice(part.row, part.row + part.count),
                tuple(self._cross[key] for key in part.keys),
                recorders.get(part.row),
            )
            for part in parts
        )

    def _encoded(self, key: bytes) -> Sequence[np.ndarray]:
        """Embeddings of an item, which another rank may have had before this one."""
        return self._vectors[key].result()

    def _on_device(self, vectors: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(vectors).to(self._model_context.device)

    def _encode(self, job: EncodeJob) -> Sequence[np.ndarray]:
        if VECTORS in job.features:
            given = job.features[VECTORS]
            layers = [given] if given.ndim == 2 else list(given)
        else:
            with torch.inference_mode():
                found = self._encoder.encode(job.kind, job.features)
                layers = [vectors.float().numpy() for vectors in found]
        if job.kind != "audio" and len(layers) != len(self._layers):  # audio: input only
            raise ValueError(f"there are vectors for {len(layers)} layers, not {len(self._layers)}")
        for vectors in layers:
            if job.count and len(vectors) != job.count:
                raise ValueError(f"there are {len(vectors)} vectors for {job.count} tokens")
            if vectors.shape[1] != self._width:
                raise ValueError(f"vectors have {vectors.shape[1]} numbers, not {self._width}")
            if not np.isfinite(vectors).all():
                raise ValueError("vectors are not finite")
        scale = self._scale
        return layers if scale == 1.0 else [layers[0] * np.float32(scale), *layers[1:]]

    def _report(self) -> MediaReport | None:
        done = [future for future in self._running if future.done()]
        encoded: dict[bytes, int] = {}
        failed: dict[bytes, str] = {}
        for future in done:
            job = self._running.pop(future)
            try:
                vectors = future.result()
            except FAILURES as error:
                failed[job.key] = f"the {job.kind} cannot be encoded: {error}"
                if self._vectors.get(job.key) is future:
                    del self._vectors[job.key]
                continue
            encoded[job.key] = sum(array.nbytes for array in vectors)
        return MediaReport(encoded=encoded, failed=failed) if done else None

    def _table_positions(self, step: StepContext, found: RowPositions) -> np.ndarray:
        """Return positions in the rotary tables; rows with three axes get spare rows."""
        positions = found.positions.copy()
        count, first = len(found.rows), self._model_context.build.length
        positions[found.rows] = np.arange(first, first + count)
        tables = [self._model_context.constant(rope.cos_sin) for rope in self._ropes]

        def write(arrays: Sequence[torch.Tensor]) -> None:
            places_KH = arrays[0].long().index_select(0, self._axes).T.to(tables[0].device)
            half = len(self._axes)
            for table in tables:
                for columns in (slice(half), slice(half, None)):
                    numbers = table[:, columns].gather(0, places_KH)
                    table[first : first + count, columns] = numbers

        if count and tables:
            step.prepare(write, found.axes)
        return positions

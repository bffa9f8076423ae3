"""Control half: which slices are pooled, and which request gets each embedding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec
import numpy as np

from sylvan.protocol.errors import RequestError
from sylvan.protocol.requests import EmbedRequest, VectorForm
from sylvan.runtime.core.req import Batch, Req
from sylvan.runtime.sched.capability import Capability, Verdict


class PoolSlice(msgspec.Struct, frozen=True):
    """Slice `index` computes tokens of an EmbedRequest from `start` on; `done`: up to its last."""

    index: int
    start: int
    done: bool
    dimensions: int | None
    normalize: bool
    form: VectorForm = "text"
    ids: tuple[int, ...] = ()  # token ids, if pooling selects single tokens (`steps`)
    spans: tuple[tuple[int, int], ...] = ()  # see `EmbedRequest`
    hidden: int = 0


class NoEmbeddings(Capability):
    """Rejects `EmbedRequest`: the model has no embeddings."""

    def gate(self, req: Req) -> Verdict:
        if isinstance(req.request, EmbedRequest):
            raise RequestError("this model does not compute embeddings")
        return Verdict.READY


class EmbeddingCapability(Capability):
    """Serves `EmbedRequest`.

    Args:
        pools_all: Whether pooling uses all tokens, so that none may come from the cache.
    """

    name: ClassVar = "embeddings"
    work_type: ClassVar = tuple[PoolSlice, ...]
    report_type: ClassVar = dict[int, np.ndarray]

    def __init__(self, *, pools_all: bool) -> None:
        self._pools_all = pools_all
        self._vectors: dict[Req, np.ndarray] = {}

    def cache_limit(self, req: Req) -> int | None:
        if not isinstance(req.request, EmbedRequest):
            return None
        reads_all = req.request.form != "text" or req.request.spans
        return 0 if self._pools_all or reads_all else None

    def plan_work(self, batch: Batch) -> tuple[PoolSlice, ...] | None:
        if batch.decodes:
            return None
        found: list[PoolSlice] = []
        for index, piece in enumerate(batch.slices):
            request = piece.req.request
            if isinstance(request, EmbedRequest):
                asked = request.dimensions, request.normalize, request.form
                ids = request.input_ids[piece.start : piece.stop] if asked[-1] == "steps" else ()
                mine = PoolSlice(
                    index,
                    piece.start,
                    piece.samples,
                    *asked,
                    tuple(map(int, ids)),
                    request.spans,
                    request.hidden,
                )
                found.append(mine)
        return tuple(found) or None

    def on_result(self, batch: Batch, report: Mapping[int, np.ndarray] | None) -> None:
        for index, vector in (report or {}).items():
            req = batch.slices[index].req
            if not req.finish:
                self._vectors[req] = vector

    def output_fields(self, req: Req) -> Mapping[str, Any] | None:
        vector = self._vectors.pop(req, None)
        return None if vector is None else {"embedding": vector}

    def on_finish(self, req: Req) -> None:
        self._vectors.pop(req, None)

"""Control half: requests wait for the encoder; slices name the embeddings they need."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
import numpy as np

from sylvan.protocol.errors import RequestError
from sylvan.protocol.requests import GenerateRequest
from sylvan.runtime.core.req import Batch, Req
from sylvan.runtime.features.multimodal.encodings import Encodings
from sylvan.runtime.features.multimodal.plan import (
    MediaPrompt,
    num_rows,
    row_ends,
    row_positions,
)
from sylvan.runtime.features.multimodal.work import (
    AlignedRows,
    CrossRows,
    MediaReport,
    MediaWork,
    VectorRows,
)
from sylvan.runtime.sched.capability import Capability, SchedulerPort, Verdict


@dataclass(frozen=True, slots=True)
class MediaCounts:
    """Encoder statistics.

    Attributes:
        encoded: Number of encoder runs.
        kept_bytes: Size of the cached embeddings.
        load: Fields of `SchedulerLoad`.
    """

    encoded: int
    kept_bytes: int
    load: Mapping[str, int]


class Multimodal(Capability):
    """Serves requests with media items (`GenerateRequest.media`), encoded concurrently.

    An item is identified by its digest and its tenant's salt, so timing reveals nothing about
    other tenants' items. A request whose items are in the prefix cache needs no encoder.

    Args:
        max_bytes: Size of embeddings cached for items without a request.
        axes: Whether rotary positions have three axes.
        whole: Whether tokens of an item also attend to later ones: slices must not split
            an item.
        prefix: Maximum tokens of a prompt whose tokens all attend to each other, so that only
            equal prompts share KV and slices must not split a prompt; 0: attention is causal.
        cross: Whether layers cross-attend to the embeddings in every step instead of reading
            them as rows.
        one: Whether all rows cross-attend to the request's only item.
    """

    name: ClassVar = "multimodal"
    work_type: ClassVar = MediaWork
    report_type: ClassVar = MediaReport

    def __init__(
        self,
        max_bytes: int,
        *,
        axes: bool = False,
        whole: bool = False,
        prefix: int = 0,
        cross: bool = False,
        one: bool = False,
    ) -> None:
        self._axes, self._whole, self._cross = axes, whole or prefix > 0, cross
        self._one = one
        self._prefix = prefix
        self._port: SchedulerPort | None = None
        self._encodings = Encodings(max_bytes)
        self._prompts: dict[str, MediaPrompt] = {}
        self._weights: dict[str, np.ndarray] = {}  # of aligned prompts

    @property
    def counts(self) -> MediaCounts:
        """Return encoder statistics."""
        found = self._encodings
        asked, reused = found.asked, found.reused
        load = {
            "encoded_items": found.encoded,
            "image_items": asked["image"],
            "image_hits": reused["image"],
            "video_items": asked["video"],
            "video_hits": reused["video"],
            "audio_items": asked["audio"],
            "audio_hits": reused["audio"],
            "encoder_entries": found.num_ready,
            "encoder_bytes": found.num_bytes,
        }
        return MediaCounts(found.encoded, found.num_bytes, load)

    def attach(self, port: SchedulerPort) -> None:
        self._port = port

    def on_arrival(self, req: Req) -> None:
        """Remove the features from a request: they are large, and needed once."""
        request = req.request
        if not (request.media or self._prefix):
            return
        salt = request.cache_salt.encode()
        keys = [salt + b"/" + item.digest for item in request.media]
        ids, prefix = request.input_ids, self._prefix > 0
        prompt = MediaPrompt(ids, request.media, keys, axes=self._axes, prefix=prefix)
        self._prompts[req.rid] = prompt
        for key, item, count in zip(keys, request.media, prompt.counts(), strict=True):
            self._encodings.add(req.rid, key, item, 0 if self._cross else count)
        light = tuple(msgspec.structs.replace(item, features={}) for item in request.media)
        req.request = msgspec.structs.replace(request, media=light)

    def cache_namespace(self, req: Req) -> str:
        """Return key spans: what the KV of prompt tokens depends on besides earlier tokens."""
        if self._one:
            return "".join(item.digest.hex() for item in req.request.media)
        if not self._prefix:  # a token also sees later ones
            return ""
        return hashlib.sha256(req.request.input_ids.tobytes()).hexdigest()

    def cache_limit(self, req: Req) -> int | None:
        """Compute all of a prompt that is aligned with its audio."""
        return 0 if _align(req) else None

    def admit(self, req: Req, admitted: Sequence[Req]) -> Verdict:
        """Wait for the embeddings that are not in the prefix cache."""
        prompt = self._prompts.get(req.rid)
        if prompt is None:
            return Verdict.READY
        assert self._port is not None
        if self._prefix and req.prompt_len > self._prefix:
            raise RequestError(
                f"a prompt has at most {self._prefix} tokens, all of which see each other: it has "
                f"{req.prompt_len}.",
                param="input_ids",
            )
        if self._one and len(prompt.keys) > 1:
            raise RequestError("this model accepts one item per prompt.", param="media")
        cached = 0 if self._cross else self._port.cached_tokens(req)
        ready = True
        for key in prompt.needed(cached):
            if why := self._encodings.error(key):
                raise RequestError(why, param="media")
            ready &= self._encodings.want(key)
        return Verdict.READY if ready else Verdict.WAIT

    def cut(self, req: Req, size: int, limit: int) -> int:
        prompt = self._prompts.get(req.rid) if self._whole else None
        return size if prompt is None else prompt.cut(req.computed, size, limit)

    def wants_step(self) -> bool:
        """Items wait for the encoder or are being encoded."""
        return self._encodings.has_work

    def plan_work(self, batch: Batch) -> MediaWork | None:
        """Return the items to encode, and the embeddings that this step reads."""
        dropped, jobs = self._encodings.next_jobs()
        rows: list[VectorRows] = []
        positions = ends = None
        cross: list[CrossRows] = []
        if self._prompts and batch.slices:
            prompts = [self._prompts.get(piece.req.rid) for piece in batch.slices]
            if self._cross:
                cross = self._cross_rows(batch, prompts)
            else:
                rows = self._rows(batch, prompts)
            positions = row_positions(batch, prompts) if self._axes else None
            ends = row_ends(batch, prompts) if self._whole else None
        seen = rows or cross or positions is not None or ends is not None
        if not (dropped or jobs or seen or self._encodings.has_work):
            return None
        return MediaWork(
            drop=dropped,
            encode=jobs,
            rows=tuple(rows),
            positions=positions,
            ends=ends,
            cross=tuple(cross),
            aligned=_aligned(batch) if cross else (),
        )

    def on_result(self, batch: Batch, report: MediaReport | None) -> None:
        """Record which items were encoded."""
        if report is None:
            return
        for key, num_bytes in report.encoded.items():
            self._encodings.done(key, num_bytes)
        for key, why in report.failed.items():
            self._encodings.failed(key, why)
        for index, weights in report.weights.items():
            self._weights[batch.slices[index].req.rid] = weights

    def output_fields(self, req: Req) -> Mapping[str, Any] | None:
        """Return what an aligned prompt attends to, once."""
        weights = self._weights.pop(req.rid, None)
        return None if weights is None else {"embedding": weights}

    def on_finish(self, req: Req) -> None:
        """Release the items of a finished request."""
        self._weights.pop(req.rid, None)
        prompt = self._prompts.pop(req.rid, None)
        if prompt is not None:
            for key in set(prompt.keys):
                self._encodings.leave(req.rid, key)

    def _cross_rows(self, batch: Batch, prompts: Sequence[MediaPrompt | None]) -> list[CrossRows]:
        found: list[CrossRows] = []
        row = 0
        for piece, prompt in zip(batch.slices, prompts, strict=True):
            count = num_rows(piece)
            if prompt is not None and self._one:
                found.append(CrossRows(row, count, prompt.keys))
            elif prompt is not None:
                found += prompt.cross(piece.start, count, row)
            row += count
        return found

    def _rows(self, batch: Batch, prompts: Sequence[MediaPrompt | None]) -> list[VectorRows]:
        found: list[VectorRows] = []
        row = 0
        for piece, prompt in zip(batch.slices, prompts, strict=True):
            if prompt is not None and piece.start < prompt.stop:
                found += prompt.rows(piece, row)
            row += num_rows(piece)
        return found


def _align(req: Req) -> int:
    """Number of vectors of its audio that a prompt is aligned with; 0: it is not aligned."""
    return req.request.align if isinstance(req.request, GenerateRequest) else 0


def _aligned(batch: Batch) -> tuple[AlignedRows, ...]:
    """Return the slices of prompts to align."""
    found: list[AlignedRows] = []
    row = 0
    for index, piece in enumerate(batch.slices):
        if (most := _align(piece.req)) and piece.start < piece.req.prompt_len:
            done = piece.stop >= piece.req.prompt_len
            found.append(AlignedRows(index, row, most, piece.start == 0, done))
        row += num_rows(piece)
    return tuple(found)

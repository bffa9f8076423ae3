"""Control half: selects the rows that predict prompt tokens, and joins the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np

from sylvan.protocol.messages import TokenLogprobs
from sylvan.protocol.requests import GenerateRequest
from sylvan.runtime.core.req import Batch, Req, Slice
from sylvan.runtime.sched.capability import Capability


class PromptRows(msgspec.Struct, frozen=True):
    """Rows of slice `index` of the step that predict the prompt tokens `token_ids`."""

    index: int
    rows: np.ndarray  # int32
    token_ids: np.ndarray  # int32


class PromptLogprobsCapability(Capability):
    """Serves `LogprobOptions.start`: once for each request, with its first output.

    A request that arrives with outputs continues one that already got them, from this server or
    another; its prompt's log probabilities are not returned again.

    The KV of prompt tokens from `start` on is recomputed, since only a forward pass predicts.
    """

    name: ClassVar = "prompt_logprobs"
    work_type: ClassVar = tuple[PromptRows, ...]
    report_type: ClassVar = dict[int, TokenLogprobs]

    def __init__(self) -> None:
        self._parts: dict[Req, dict[int, TokenLogprobs]] = {}
        self._done: set[Req] = set()
        self._running: set[Req] = set()  # requests that want prompt log probabilities
        self.active = False

    def cache_limit(self, req: Req) -> int | None:
        request = req.request
        if not isinstance(request, GenerateRequest) or request.logprobs is None:
            return None
        answered = req in self._done or len(request.output_ids) > 0
        return None if answered else request.logprobs.start

    def on_start(self, piece: Slice) -> None:
        if self.cache_limit(piece.req) is not None:
            self._running.add(piece.req)
            self.active = True

    def plan_work(self, batch: Batch) -> tuple[PromptRows, ...] | None:
        if batch.decodes:
            return None
        found: list[PromptRows] = []
        row = 0
        for index, piece in enumerate(batch.slices):
            if piece.start < piece.req.prompt_len and (own := _rows(index, piece, row)):
                found.append(own)
            row += piece.stop - piece.start + (len(piece.draft.tokens) if piece.draft else 0)
        return tuple(found) or None

    def on_result(self, batch: Batch, report: Mapping[int, TokenLogprobs] | None) -> None:
        for index, part in (report or {}).items():
            piece = batch.slices[index]
            if not piece.req.finish and self.cache_limit(piece.req) is not None:
                self._parts.setdefault(piece.req, {})[piece.start] = part

    def output_fields(self, req: Req) -> Mapping[str, Any] | None:
        """Return all of them, in order; the first token has none."""
        start = self.cache_limit(req)
        if start is None:
            return None
        self._done.add(req)
        parts = self._parts.pop(req, {})
        first = _empty_position(req, min(start, req.prompt_len - 1), [*parts.values()])
        return {"prompt_logprobs": _join([first, *(parts[at] for at in sorted(parts))])}

    def on_finish(self, req: Req) -> None:
        self._parts.pop(req, None)
        self._done.discard(req)
        self._running.discard(req)
        self.active = bool(self._running)


def _rows(index: int, piece: Slice, row: int) -> PromptRows | None:
    """Return the rows that predict prompt tokens; none once there are outputs."""
    req = piece.req
    if not isinstance(req.request, GenerateRequest):
        return None
    options = req.request.logprobs
    if options is None or options.start is None or req.num_tokens > req.prompt_len + piece.samples:
        return None
    first = max(piece.start, options.start)
    last = min(piece.stop, req.prompt_len - 1)
    if first >= last:
        return None
    rows = np.arange(row + first - piece.start, row + last - piece.start, dtype=np.int32)
    return PromptRows(index, rows, req.tokens.view(first + 1, last + 1).copy())


def _empty_position(req: Req, position: int, like: Sequence[TokenLogprobs]) -> TokenLogprobs:
    """Return one position without log probabilities, in the shapes of `like`."""

    def row(name: str, fill: float) -> np.ndarray | None:
        model = getattr(like[0], name) if like else None
        return None if model is None else np.full((1, model.shape[1]), fill, model.dtype)

    return TokenLogprobs(
        token_ids=req.tokens.view(position, position + 1).copy(),
        logprobs=np.full(1, np.nan, np.float32),
        top_ids=row("top_ids", -1),
        top_logprobs=row("top_logprobs", np.nan),
        chosen_logprobs=row("chosen_logprobs", np.nan),
    )


def _join(parts: Sequence[TokenLogprobs]) -> TokenLogprobs:
    def rows(name: str) -> np.ndarray | None:
        arrays = [a for p in parts if (a := getattr(p, name)) is not None]
        return np.concatenate(arrays) if arrays else None

    ids, logprobs = rows("token_ids"), rows("logprobs")
    assert ids is not None
    assert logprobs is not None
    return TokenLogprobs(
        token_ids=ids,
        logprobs=logprobs,
        top_ids=rows("top_ids"),
        top_logprobs=rows("top_logprobs"),
        chosen_logprobs=rows("chosen_logprobs"),
    )

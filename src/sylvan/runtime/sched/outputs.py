"""From what a step brought to what the client is told."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from sylvan.protocol.errors import RequestError
from sylvan.protocol.messages import Finish, Timing, TokenLogprobs, TokenOutput, Usage
from sylvan.protocol.requests import GenerateRequest
from sylvan.runtime.core.req import NEVER, Req, Slice, SliceOutput, StepResult


def finish_reason(req: Req, token: int) -> Finish | None:
    """Whether `token`, the newest of `req`, ends it."""
    count = req.tokens.length
    if token in req.stop_ids and count > req.min_tokens:
        return Finish(type="stop", matched=token)
    if count >= req.max_tokens:
        return Finish(type="length", length=count - req.prompt_len)
    return None


def refusal(error: RequestError) -> Finish:
    """The end of a request that a feature refuses."""
    return Finish(type="abort", message=str(error), status=error.status, param=error.param)


def text_may_end_earlier(req: Req) -> bool:
    """Whether the detokenizer may yet find a stop in text that was generated before the end."""
    request, finish = req.request, req.finish
    if not isinstance(request, GenerateRequest) or finish is None:
        return False
    has_stops = bool(request.sampling.stop or request.sampling.stop_regex)
    return has_stops and finish.type != "abort" and not isinstance(finish.matched, str)


def usage(req: Req) -> Usage:
    """Counts of `req` so far."""
    return Usage(
        prompt_tokens=req.prompt_len,
        completion_tokens=max(0, req.num_outputs),
        cached_tokens=req.cached_tokens,
        retractions=req.retractions,
    )


def output(
    req: Req,
    now_s: float,
    *,
    logprobs: TokenLogprobs | None = None,
    prompt_logprobs: TokenLogprobs | None = None,
    embedding: np.ndarray | None = None,
) -> TokenOutput:
    """All that is new of `req`, of which the client is told now; its timing if it has ended."""
    timing = None
    if req.finish:
        timing = Timing(
            received=req.arrived_s,
            started=req.started_s,
            first_token=req.first_token_s,
            finished=now_s,
        )
    return TokenOutput(
        rid=req.rid,
        token_ids=_untold(req),
        usage=usage(req),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        embedding=embedding,
        finish=req.finish,
        timing=timing,
    )


def kept_back(reqs: Iterable[Req]) -> list[TokenOutput]:
    """What nobody waits for of requests that go on; see `GenerateRequest.interval`."""
    kept = (r for r in reqs if r.tell_every == NEVER and r.told < r.tokens.length)
    return [TokenOutput(rid=r.rid, token_ids=_untold(r), usage=usage(r)) for r in kept]


def _untold(req: Req) -> tuple[int, ...]:
    """Tokens of which the client was not told; from now on it has been."""
    start, stop = req.told, req.tokens.length
    req.told, req.tell_at = stop, stop + req.tell_every
    if start == stop - 1:
        return (req.tokens.last,)
    return tuple(req.tokens.view(start, stop).tolist())


def accept_plain(
    pieces: Sequence[Slice], result: StepResult, outbox: list[TokenOutput]
) -> list[tuple[Slice, SliceOutput]]:
    """Give requests that go on afterwards their next token, which is nearly all there is to do.

    Returns those to which there is more, unchanged, with what the step brought for them.
    """
    left: list[tuple[Slice, SliceOutput]] = []
    others, tell = result.others, outbox.append
    for index, (piece, token) in enumerate(zip(pieces, result.tokens or (), strict=True)):
        req = piece.req
        known = req.tokens
        length = known.length + 1
        if (
            length >= req.max_tokens
            or token in req.stop_ids
            or req.finish
            or piece.draft
            or not (piece.samples and req.first_token_s)
            or (others and index in others)
        ):
            left.append((piece, others.get(index) or SliceOutput((token,))))
            continue
        req.pending -= 1
        known.append(token)
        if length < req.tell_at:
            continue
        counts = Usage(
            prompt_tokens=req.prompt_len,
            completion_tokens=length - req.prompt_len,
            cached_tokens=req.cached_tokens,
            retractions=req.retractions,
        )
        tell(TokenOutput(rid=req.rid, token_ids=_untold(req), usage=counts))
    return left


def met_targets(req: Req, now_s: float) -> bool | None:
    """Whether `req`, which ended now, met its latency targets; None if it had none."""
    request = req.request
    if (
        not isinstance(request, GenerateRequest)
        or (request.ttft_ms, request.tpot_ms) == (None,) * 2
    ):
        return None
    if not req.first_token_s:
        return False
    first_ms = (req.first_token_s - req.arrived_s) * 1e3
    each_ms = (now_s - req.first_token_s) * 1e3 / max(1, req.num_outputs - 1)
    late = request.ttft_ms is not None and first_ms > request.ttft_ms
    slow = request.tpot_ms is not None and each_ms > request.tpot_ms
    return not late and not slow


class PromptLogprobs:
    """Collects the prompt log probabilities of requests whose prompt is computed in pieces."""

    def __init__(self) -> None:
        self._parts: dict[str, dict[int, TokenLogprobs]] = {}
        self._done: set[str] = set()

    def wanted(self, req: Req) -> int | None:
        """First prompt position whose KV must be computed anew for `req`, if any."""
        request = req.request
        if not isinstance(request, GenerateRequest) or request.logprobs is None:
            return None
        return None if req.rid in self._done else request.logprobs.start

    def add(self, req: Req, start: int, part: TokenLogprobs) -> None:
        """Keep those that the rows from position `start` on predict."""
        self._parts.setdefault(req.rid, {})[start] = part

    def take(self, req: Req) -> TokenLogprobs | None:
        """All of them, in order, once; the first prompt token asked for has none."""
        start = self.wanted(req)
        if start is None:
            return None
        self._done.add(req.rid)
        parts = self._parts.pop(req.rid, {})
        first = _nothing(req, min(start, req.prompt_len - 1), [*parts.values()])
        return _join([first, *(parts[at] for at in sorted(parts))])

    def forget(self, rid: str) -> None:
        """The request ended."""
        self._parts.pop(rid, None)
        self._done.discard(rid)


def head(logprobs: TokenLogprobs | None, count: int) -> TokenLogprobs | None:
    """The first `count` positions."""
    if logprobs is None or len(logprobs.token_ids) == count:
        return logprobs
    rows = (
        None if a is None else a[:count]
        for a in (logprobs.top_ids, logprobs.top_logprobs, logprobs.chosen_logprobs)
    )
    return TokenLogprobs(
        token_ids=logprobs.token_ids[:count],
        logprobs=logprobs.logprobs[:count],
        **dict(zip(("top_ids", "top_logprobs", "chosen_logprobs"), rows, strict=True)),
    )


def _nothing(req: Req, position: int, like: Sequence[TokenLogprobs]) -> TokenLogprobs:
    """One position without log probabilities, in the shapes of `like`."""

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

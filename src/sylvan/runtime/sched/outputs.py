"""Converts step results to outputs for clients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from sylvan.protocol.errors import RequestError
from sylvan.protocol.logprobs import cut
from sylvan.protocol.messages import Finish, Timing, TokenLogprobs, TokenOutput, Usage
from sylvan.protocol.requests import GenerateRequest
from sylvan.runtime.core.req import NEVER, Req, Slice
from sylvan.runtime.core.step import SliceOutput, StepResult


def finish_reason(req: Req, token: int) -> Finish | None:
    """The finish reason if `token`, the newest of `req`, ends it."""
    count = req.tokens.length
    if token in req.stop_ids and count > req.min_tokens:
        return Finish(type="stop", matched=token)
    if count >= req.max_tokens:
        return Finish(type="length", length=count - req.prompt_len)
    return None


def refusal(error: RequestError) -> Finish:
    """The finish of a request that a capability rejected."""
    return Finish(type="abort", message=str(error), status=error.status, param=error.param)


def text_may_end_earlier(req: Req) -> bool:
    """Whether the detokenizer may still find a stop string in the generated text."""
    request, finish = req.request, req.finish
    if not isinstance(request, GenerateRequest) or finish is None:
        return False
    has_stops = bool(request.sampling.stop or request.sampling.stop_regex)
    return has_stops and finish.type != "abort" and not isinstance(finish.matched, str)


def usage(req: Req) -> Usage:
    """Token counts of `req` so far."""
    return Usage(
        prompt_tokens=req.prompt_len,
        completion_tokens=max(0, req.num_outputs),
        cached_tokens=req.cached_tokens,
        loaded_tokens=req.loaded_tokens,
        host_tokens=req.host_tokens,
        retractions=req.retractions,
        drafts=req.drafts,
        taken_back=req.review.taken_back if req.review is not None else 0,
    )


def output(req: Req, now_s: float, **fields: Any) -> TokenOutput:
    """Build an output of all new tokens of `req`, and mark them as emitted.

    Args:
        req: The request.
        now_s: Current time, for the timing of an ended request; else None.
        fields: Further fields of `TokenOutput`.
    """
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
        token_ids=_take_new(req),
        usage=usage(req),
        finish=req.finish,
        timing=timing,
        **fields,
    )


def buffered_outputs(reqs: Iterable[Req]) -> list[TokenOutput]:
    """Buffered tokens of unfinished requests; see `GenerateRequest.interval`."""
    buffered = (r for r in reqs if r.emit_interval == NEVER and r.num_emitted < emittable(r))
    return [TokenOutput(rid=r.rid, token_ids=_take_new(r), usage=usage(r)) for r in buffered]


def emittable(req: Req) -> int:
    """Number of tokens, including the prompt, that may be emitted."""
    length, review = req.tokens.length, req.review
    return length if review is None else max(req.num_emitted, min(length, review.final))


def _take_new(req: Req) -> tuple[int, ...]:
    """Return the tokens not emitted yet, and mark them as emitted."""
    start, stop = req.num_emitted, emittable(req)
    req.num_emitted, req.emit_at = stop, stop + req.emit_interval
    if start == stop - 1 == req.tokens.length - 1:
        return (req.tokens.last,)
    return tuple(req.tokens.view(start, stop).tolist())


def accept_plain(
    pieces: Sequence[Slice], result: StepResult, outbox: list[TokenOutput]
) -> list[tuple[Slice, SliceOutput]]:
    """Fast path: append one token to each request that continues and needs nothing else.

    Returns the other slices, unchanged, with their results.
    """
    left: list[tuple[Slice, SliceOutput]] = []
    others, emit = result.others, outbox.append
    for index, (piece, token) in enumerate(zip(pieces, result.tokens, strict=True)):
        req = piece.req
        known = req.tokens
        length = known.length + 1
        if (
            length >= req.max_tokens
            or token in req.stop_ids
            or req.finish
            or req.review
            or not req.first_token_s
            or (piece is not req.decode and (piece.draft or not piece.samples))
            or (others and index in others)
        ):
            left.append((piece, others.get(index) or SliceOutput((token,))))
            continue
        req.pending -= 1
        known.append(token)
        if length < req.emit_at:
            continue
        counts = Usage(
            prompt_tokens=req.prompt_len,
            completion_tokens=length - req.prompt_len,
            cached_tokens=req.cached_tokens,
            loaded_tokens=req.loaded_tokens,
            host_tokens=req.host_tokens,
            retractions=req.retractions,
            drafts=req.drafts,
        )
        if req.num_emitted == length - 1:  # `_take_new`, inlined for speed
            req.num_emitted, req.emit_at = length, length + req.emit_interval
            new = (token,)
        else:
            new = _take_new(req)
        emit(TokenOutput(rid=req.rid, token_ids=new, usage=counts))
    return left


def met_targets(req: Req, now_s: float) -> bool | None:
    """Whether `req`, which ends now, met its latency targets; None without targets."""
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


def without_chosen(logprobs: TokenLogprobs | None) -> TokenLogprobs | None:
    """Logprobs of the first position, which has no sampled token to report."""
    first = None if logprobs is None else cut(logprobs, 0, 1)
    if first is None:
        return None
    return msgspec.structs.replace(
        first, token_ids=first.token_ids[:0], logprobs=first.logprobs[:0]
    )


def head(logprobs: TokenLogprobs | None, count: int) -> TokenLogprobs | None:
    """The first `count` positions."""
    if logprobs is None or len(logprobs.token_ids) == count:
        return logprobs
    return cut(logprobs, 0, count)

"""Requests of late: what they asked for, what they got, and where their time went."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import msgspec

from sylvan.protocol.messages import Finish, Usage
from sylvan.protocol.requests import GenerateRequest
from sylvan.runtime.tokenizer.live import LiveRequest, SampleState
from sylvan.runtime.tokenizer.router import ReplicaRouter
from sylvan.runtime.tokenizer.timeline import StageName, began_s, stages
from sylvan.utils.clock import Clock

KEPT = 256
MAX_RID_CHARS = 256


class PastRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that is over.

    Attributes:
        rid: The client's name for it.
        tenant: Whose it is.
        kind: `generate` or `embed`.
        began_s: When it came, on the monotonic clock.
        samples: How many answers were asked for.
        usage: Counts of its samples: the prompt once, the outputs together.
        finish: Why its last sample ended.
        adapter: LoRA adapter, if any.
        stages: Seconds of its last sample in each stage, in order; they add up (`timeline`).
    """

    rid: str
    tenant: str
    kind: str
    began_s: float
    samples: int
    usage: Usage
    finish: str
    adapter: str | None
    stages: dict[StageName, float]


class RecentRequests:
    """The newest requests that are over, and those under way; their texts are not kept.

    Args:
        router: Tells of requests that are over, and has those under way.
        clock: As the router's.
        wall: Seconds since 1970.
        size: How many to keep.
    """

    def __init__(
        self, router: ReplicaRouter, clock: Clock, wall: Callable[[], float], size: int = KEPT
    ) -> None:
        self._router, self._clock, self._wall = router, clock, wall
        self._past: deque[PastRequest] = deque(maxlen=size)
        router.observers.append(self._ended)

    def view(self, tenant: str | None, limit: int) -> dict[str, Any]:
        """The newest first, at most `limit` that are over and as many under way.

        Args:
            tenant: Only its requests; None: those of everyone.
            limit: From 1.
        """
        past = (p for p in reversed(self._past) if tenant in (None, p.tenant))
        since = self._wall() - self._clock()
        return {
            "running": list(islice(self._running(tenant), limit)),
            "requests": [_past_view(p, since) for p in islice(past, limit)],
        }

    def _running(self, tenant: str | None) -> Iterator[dict[str, Any]]:
        now, wall = self._clock(), self._wall()
        for live in self._router.live:
            if live.internal or tenant not in (None, live.tenant):
                continue
            yield {
                "rid": live.rid[:MAX_RID_CHARS],
                "tenant": live.tenant,
                "kind": _kind(live),
                "arrived": wall - (now - live.arrived_s),
                "age_s": now - live.arrived_s,
                "samples": len(live.samples),
                "prompt_tokens": len(live.request.input_ids),
                "completion_tokens": sum(len(sample.output_ids) for sample in live.samples),
                "adapter": live.request.lora,
            }

    def _ended(self, live: LiveRequest) -> None:
        if live.internal:
            return
        last = max(live.samples, key=lambda sample: sample.timing.finished if sample.timing else 0)
        self._past.append(
            PastRequest(
                rid=live.rid[:MAX_RID_CHARS],
                tenant=live.tenant,
                kind=_kind(live),
                began_s=began_s(live),
                samples=len(live.samples),
                usage=_usage(live.samples),
                finish=_finish_name(last.finish),
                adapter=live.request.lora,
                stages={stage.name: stage.seconds for stage in stages(live, last)},
            )
        )


def _kind(live: LiveRequest) -> str:
    return "generate" if isinstance(live.request, GenerateRequest) else "embed"


def _usage(samples: list[SampleState]) -> Usage:
    first = max((s.usage for s in samples), key=lambda usage: usage.prompt_tokens)
    output = sum(sample.usage.completion_tokens for sample in samples)
    prompt = first.prompt_tokens or len(samples[0].request.input_ids)
    return msgspec.structs.replace(first, prompt_tokens=prompt, completion_tokens=output)


def _finish_name(finish: Finish | None) -> str:
    """As `/metrics` tells aborts of clients from those of the server."""
    if finish is None:
        return "abort_client"
    if finish.type != "abort":
        return finish.type
    return "abort_client" if finish.status is None else "abort_server"


def _past_view(past: PastRequest, since: float) -> dict[str, Any]:
    """As JSON; the monotonic clock was 0 `since` seconds after 1970 began."""
    usage = past.usage
    return {
        "rid": past.rid,
        "tenant": past.tenant,
        "kind": past.kind,
        "arrived": past.began_s + since,
        "samples": past.samples,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": {
            "device": usage.cached_tokens - usage.loaded_tokens - usage.host_tokens,
            "host": usage.host_tokens,
            "storage": usage.loaded_tokens,
        },
        "retractions": usage.retractions,
        "finish": past.finish,
        "adapter": past.adapter,
        "stages": past.stages,
    }

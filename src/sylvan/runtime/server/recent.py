"""Recent requests: what they asked for, what they got, and where their time went."""

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
    """A finished request.

    Attributes:
        rid: Request ID.
        tenant: Its tenant.
        kind: `generate` or `embed`.
        began_s: Arrival time on the monotonic clock.
        samples: Number of samples.
        usage: Token counts: the prompt once, all outputs together.
        finish: Finish reason of its last sample.
        adapter: LoRA adapter; None: none.
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
    """The newest finished requests, and those in flight; texts are not kept.

    Args:
        router: Reports finished requests, and lists those in flight.
        clock: The router's clock.
        wall: Wall clock, in seconds since the Unix epoch.
        size: Number of requests kept.
    """

    def __init__(
        self, router: ReplicaRouter, clock: Clock, wall: Callable[[], float], size: int = KEPT
    ) -> None:
        self._router, self._clock, self._wall = router, clock, wall
        self._past: deque[PastRequest] = deque(maxlen=size)
        router.observers.append(self._ended)

    def view(self, tenant: str | None, limit: int) -> dict[str, Any]:
        """Return the newest requests first, at most `limit` finished and as many in flight.

        Args:
            tenant: Only this tenant's requests; None: all.
            limit: At least 1.
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
    """Return the finish reason as in `/metrics`, which tells client aborts from the server's."""
    if finish is None:
        return "abort_client"
    if finish.type != "abort":
        return finish.type
    return "abort_client" if finish.status is None else "abort_server"


def _past_view(past: PastRequest, since: float) -> dict[str, Any]:
    """Return the JSON form; the monotonic clock was 0 at `since` seconds after the epoch."""
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

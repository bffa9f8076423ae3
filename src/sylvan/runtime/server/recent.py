"""Recent requests: what they asked for, what they got, and where their time went."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from sylvan.protocol.messages import Finish
from sylvan.protocol.requests import GenerateRequest
from sylvan.runtime.tokenizer.ended import EndedRequest, ended
from sylvan.runtime.tokenizer.live import LiveRequest
from sylvan.runtime.tokenizer.router import ReplicaRouter
from sylvan.utils.clock import Clock

KEPT = 256
MAX_RID_CHARS = 256


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
        self._past: deque[EndedRequest] = deque(maxlen=size)
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
        if not live.internal:
            self._past.append(ended(live))


def _kind(live: LiveRequest) -> str:
    return "generate" if isinstance(live.request, GenerateRequest) else "embed"


def _finish_name(finish: Finish | None) -> str:
    """Return the finish reason as in `/metrics`; aborts by clients and server differ."""
    if finish is None:
        return "abort_client"
    if finish.type != "abort":
        return finish.type
    return "abort_client" if finish.status is None else "abort_server"


def _past_view(past: EndedRequest, since: float) -> dict[str, Any]:
    """Return the JSON form; the monotonic clock was 0 at `since` seconds after the epoch.

    The prompt counts once, the outputs of all samples together; reason and times are those of the
    sample that finished last.
    """
    usage = max((s.usage for s in past.samples), key=lambda usage: usage.prompt_tokens)
    last = max(past.samples, key=lambda sample: sample.finished_s)
    return {
        "rid": past.rid[:MAX_RID_CHARS],
        "tenant": past.tenant,
        "kind": past.kind,
        "arrived": past.began_s + since,
        "samples": len(past.samples),
        "prompt_tokens": usage.prompt_tokens or past.prompt_tokens,
        "completion_tokens": sum(sample.usage.completion_tokens for sample in past.samples),
        "cached_tokens": {
            "device": usage.cached_tokens - usage.loaded_tokens - usage.host_tokens,
            "host": usage.host_tokens,
            "storage": usage.loaded_tokens,
        },
        "retractions": usage.retractions,
        "finish": _finish_name(last.finish),
        "adapter": past.adapter,
        "stages": {stage.name: stage.seconds for stage in last.stages},
    }

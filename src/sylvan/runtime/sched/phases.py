"""Requests by phase, and the allowed moves between phases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sylvan.runtime.core.req import Phase, Req
from sylvan.runtime.sched.queue import WaitingQueue

TRANSITIONS: Mapping[Phase, frozenset[Phase]] = {
    Phase.WAITING: frozenset({Phase.LOADING, Phase.RUNNING, Phase.CLOSING, Phase.ENDED}),
    Phase.LOADING: frozenset({Phase.RUNNING, Phase.WAITING, Phase.HELD, Phase.ENDED}),
    Phase.RUNNING: frozenset({Phase.WAITING, Phase.CLOSING, Phase.HELD, Phase.ENDED}),
    Phase.CLOSING: frozenset({Phase.HELD, Phase.ENDED}),
    Phase.HELD: frozenset({Phase.ENDED}),
    Phase.ENDED: frozenset(),
}
"""Allowed transitions between phases."""


class RequestTable:
    """All requests of a scheduler, grouped by phase.

    Attributes:
        waiting: Requests without memory, in scheduling order.
        running: Running requests, in start order.
        loading: Requests whose memory a load is filling, by rid.
        closing: Sampled completely, but the detokenizer may still find a stop string; by rid.
        held: Ended requests whose memory a capability still needs, by rid.
    """

    def __init__(self, waiting: WaitingQueue) -> None:
        self.waiting = waiting
        self.running: list[Req] = []
        self.loading: dict[str, Req] = {}
        self.closing: dict[str, Req] = {}
        self.held: dict[str, Req] = {}
        self._live: dict[str, Req] = {}

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    def __contains__(self, rid: str) -> bool:
        """Whether `rid` belongs to a request that still owns something."""
        return rid in self._live or rid in self.closing or rid in self.held

    def add(self, req: Req) -> None:
        """Add a new request in the waiting phase."""
        assert req.phase is Phase.WAITING
        self._live[req.rid] = req
        self.waiting.add(req)

    def live(self, rid: str) -> Req | None:
        """Return the request `rid` unless it has ended."""
        return self._live.get(rid)

    def all_live(self) -> tuple[Req, ...]:
        """All requests that have not ended, in arrival order."""
        return tuple(self._live.values())

    def with_memory(self) -> Iterator[Req]:
        """All requests that own KV memory."""
        for group in (self.running, self.loading.values(), self.closing.values()):
            yield from (req for req in group if req.kv is not None)
        yield from (req for req in self.held.values() if req.kv is not None)

    def move(self, req: Req, phase: Phase) -> None:
        """Move `req` to another phase; asserts that the move is allowed."""
        assert phase in TRANSITIONS[req.phase], f"{req.rid}: {req.phase} -> {phase}"
        self._leave(req)
        req.phase = phase
        match phase:
            case Phase.WAITING:
                self.waiting.add(req)
            case Phase.RUNNING:
                self.running.append(req)
            case Phase.LOADING:
                self.loading[req.rid] = req
            case Phase.CLOSING:
                self.closing[req.rid] = req
            case Phase.HELD:
                self.held[req.rid] = req
            case Phase.ENDED:
                pass

    def _leave(self, req: Req) -> None:
        match req.phase:
            case Phase.WAITING:
                self.waiting.remove(req)
            case Phase.RUNNING:
                self.running.remove(req)
            case Phase.LOADING:
                del self.loading[req.rid]
            case Phase.CLOSING:
                del self.closing[req.rid]
            case Phase.HELD:
                del self.held[req.rid]
            case Phase.ENDED:
                pass

    def end(self, req: Req) -> None:
        """Mark `req` as ended; its phase changes with the next move."""
        del self._live[req.rid]

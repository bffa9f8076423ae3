"""A scheduler whose calls are written down before they are carried out."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from sylvan.protocol.messages import Finish, Load
from sylvan.protocol.requests import EmbedRequest, GenerateRequest
from sylvan.runtime.core.req import Req
from sylvan.runtime.sched.limits import Limits, Parts
from sylvan.runtime.sched.recording import Added, Begin, Called, End, Recorder
from sylvan.runtime.sched.scheduler import CLIENT_ABORT, Scheduler


class RecordedScheduler:
    """Stands in for a `Scheduler`; all that it is told and all that it decides is recorded."""

    def __init__(self, parts: Parts, limits: Limits, recorder: Recorder) -> None:
        self._recorder = recorder
        wrapped = replace(
            parts,
            clock=recorder.clock(parts.clock),
            executor=recorder.executor(parts.executor),
            features=tuple(recorder.feature(n, f) for n, f in enumerate(parts.features)),
        )
        self._scheduler = Scheduler(wrapped, limits)

    @property
    def running(self) -> list[Req]:
        """See `Scheduler.running`."""
        return self._scheduler.running

    @property
    def idle(self) -> bool:
        """See `Scheduler.idle`."""
        return self._scheduler.idle

    def add(self, request: GenerateRequest | EmbedRequest) -> None:
        """See `Scheduler.add`."""
        self._recorder.write(Added(request))
        self._scheduler.add(request)

    def abort(self, rid: str, finish: Finish = CLIENT_ABORT) -> None:
        """See `Scheduler.abort`."""
        self._recorder.write(Called("abort", (rid, finish)))
        self._scheduler.abort(rid, finish)

    def stop_at(self, rid: str, num_tokens: int, matched: str | None) -> None:
        """See `Scheduler.stop_at`."""
        self._recorder.write(Called("stop_at", (rid, num_tokens, matched)))
        self._scheduler.stop_at(rid, num_tokens, matched)

    def release(self, rid: str) -> None:
        """See `Scheduler.release`."""
        self._recorder.write(Called("release", (rid,)))
        self._scheduler.release(rid)

    def step(self) -> bool:
        """See `Scheduler.step`."""
        self._recorder.write(Begin())
        try:
            return self._scheduler.step()
        finally:
            self._recorder.write(End())

    def pause(self, mode: Literal["abort", "retract", "in_place"]) -> int:
        """See `Scheduler.pause`."""
        self._recorder.write(Called("pause", (mode,)))
        return self._scheduler.pause(mode)

    def resume(self) -> None:
        """See `Scheduler.resume`."""
        self._recorder.write(Called("resume"))
        self._scheduler.resume()

    def tell(self) -> None:
        """See `Scheduler.tell`; it decides nothing."""
        self._scheduler.tell()

    def flush_cache(self) -> bool:
        """See `Scheduler.flush_cache`."""
        self._recorder.write(Called("flush_cache"))
        return self._scheduler.flush_cache()

    def cached_tokens(self, req: Req) -> int:
        """See `Scheduler.cached_tokens`."""
        return self._scheduler.cached_tokens(req)

    def audit(self) -> int:
        """See `Scheduler.audit`; one that changes nothing is not worth writing down."""
        lost = self._scheduler.audit()
        if lost:
            self._recorder.write(Called("audit"))
        return lost

    def load(self) -> Load:
        """See `Scheduler.load`."""
        return self._scheduler.load()

"""How grammars, LoRA, speculation and disaggregation follow requests through the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import ClassVar

from sylvan.runtime.core.req import Batch, Draft, Req, Slice


class Verdict(Enum):
    """Whether a request may take part in this step.

    SETTLE: not before the id of its last token is known; others go on.
    """

    READY = auto()
    WAIT = auto()
    SETTLE = auto()


class Feature:
    """Control-plane half of a capability. Override what you need.

    Hooks run on the scheduler's thread and must not block; slow work goes to a future that
    `poll` looks at. A hook that raises RequestError fails that request only. A hook that is not
    overridden costs nothing.

    Attributes:
        gates_running: Whether `gate` may hold up a request that runs already; if not, it is asked
            for waiting ones only.
    """

    gates_running: ClassVar[bool] = True

    def poll(self) -> None:
        """Advance asynchronous work. Once per step, before anything else."""

    def gate(self, req: Req) -> Verdict:
        """Whether `req` may run in this step; asked for waiting and running requests."""
        return Verdict.READY

    def draft(self, req: Req) -> Draft | None:
        """Guesses to verify in this step after the known tokens (speculation)."""
        return None

    def on_batch(self, batch: Batch) -> None:
        """`batch` is what this step runs; possibly empty."""

    def on_start(self, piece: Slice) -> None:
        """`piece` is the first work of a request that waited; also when it lost its memory."""

    def on_tokens(self, req: Req, tokens: Sequence[int]) -> None:
        """`tokens` were appended to `req`."""

    def on_finish(self, req: Req) -> None:
        """`req` left the queues; drop the state kept for it."""

    def holds(self, req: Req) -> bool:
        """Whether the finished `req` keeps its KV until `Scheduler.release`."""
        return False


def overriding(features: Sequence[Feature], hook: str) -> tuple[Feature, ...]:
    """Those that do something in a hook."""
    return tuple(f for f in features if getattr(type(f), hook) is not getattr(Feature, hook))


class Hooks:
    """Calls those hooks of some features that do something."""

    def __init__(self, features: Sequence[Feature]) -> None:
        self._pollers = overriding(features, "poll")
        self._starters = overriding(features, "on_start")
        self._watchers = overriding(features, "on_batch")
        self._followers = overriding(features, "on_tokens")
        self._finishers = overriding(features, "on_finish")
        self._holders = overriding(features, "holds")
        self.follows = bool(self._followers)

    def poll(self) -> None:
        """See `Feature.poll`."""
        for feature in self._pollers:
            feature.poll()

    def launch(self, batch: Batch, started: Sequence[Slice]) -> None:
        """See `Feature.on_start` and `Feature.on_batch`."""
        for feature in self._starters if started else ():
            for piece in started:
                feature.on_start(piece)
        for feature in self._watchers:
            feature.on_batch(batch)

    def follow(self, req: Req, tokens: Sequence[int]) -> None:
        """See `Feature.on_tokens`."""
        for feature in self._followers:
            feature.on_tokens(req, tokens)

    def finish(self, req: Req) -> None:
        """See `Feature.on_finish`."""
        for feature in self._finishers:
            feature.on_finish(req)

    def holds(self, req: Req) -> bool:
        """See `Feature.holds`."""
        return any(feature.holds(req) for feature in self._holders)

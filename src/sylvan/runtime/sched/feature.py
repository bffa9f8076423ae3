"""How grammars, LoRA, speculation and disaggregation follow requests through the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from sylvan.runtime.core.req import Batch, Draft, Req


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
    `poll` looks at. A hook that raises RequestError fails that request only.
    """

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

    def on_tokens(self, req: Req, tokens: Sequence[int]) -> None:
        """`tokens` were appended to `req`."""

    def on_finish(self, req: Req) -> None:
        """`req` left the queues; drop the state kept for it."""

    def holds(self, req: Req) -> bool:
        """Whether the finished `req` keeps its KV until `Scheduler.release`."""
        return False

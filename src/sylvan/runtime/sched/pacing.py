"""How much of prompts a step computes under a policy that protects requests that decode."""

from __future__ import annotations

from collections.abc import Sequence

from sylvan.runtime.core.req import Req
from sylvan.runtime.sched.policies.api import PacingPolicy
from sylvan.runtime.sched.queue import WaitingQueue

AGED_TOKENS = 64  # minimum prompt tokens per step while a request has waited too long


def paced_tokens(policy: PacingPolicy, running: Sequence[Req], waiting: WaitingQueue) -> int | None:
    """Return the prompt-token budget of this step; None if no prompt is pending.

    Never zero while any request is aged: this bounds starvation.
    """
    prompts = [r for r in running if r.lacking > 1]
    urgent = max((r.priority for r in prompts), default=None)
    if len(waiting):
        highest = waiting.highest_priority
        urgent = highest if urgent is None else max(urgent, highest)
    if urgent is None:
        return None
    tokens = policy.prompt_tokens(running, urgent)
    if tokens < AGED_TOKENS and (waiting.any_aged or any(map(waiting.is_aged, prompts))):
        return AGED_TOKENS
    return tokens

"""Dependencies and limits of a scheduler; the step size is the only limit that adapts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from sylvan.protocol.messages import TokenOutput
from sylvan.runtime.cache.by_rank import KVMemory
from sylvan.runtime.core.req import Batch
from sylvan.runtime.executor.api import Executor
from sylvan.runtime.sched.capability import Capability
from sylvan.runtime.sched.policies.api import PolicyContext, SchedulePolicy
from sylvan.utils.clock import Clock, monotonic

RECOVER_STEPS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerLimits:
    """Upper bounds of a step, of the queue, and of waiting.

    `inflight`: most launched steps without a result; 2 plans a step while the previous one runs.
    `stage_batch`: most decoding requests of a step with pipeline stages; None: an equal share.
    `chunk_tokens`: most prompt tokens per step, so that prefill does not delay decoding.
    `age_limit_s`: requests that have waited longer come first within their priority, under any
    policy, which bounds starvation. `load_timeout_s`: a request whose load takes longer recomputes
    its KV. `share_in_batch`: a request may read pages that another request of the same step writes
    (the executor stores all keys and values of a layer before it attends).
    """

    max_batch_tokens: int = 8192
    chunk_tokens: int = 2048
    max_running_reqs: int = 256
    max_waiting_reqs: int = 4096
    inflight: int = 1
    stage_batch: int | None = None
    queue_timeout_s: float | None = None
    load_timeout_s: float = 30.0
    age_limit_s: float = 10.0
    conservativeness: float = 1.0
    preemption_threshold: int | None = 10
    share_in_batch: bool = True
    whole_prompts: bool = False  # bidirectional encoders cannot be chunked


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerDeps:
    """The parts that a scheduler is built from; wired in `engine.build`.

    `policy` builds the policy after the scheduler exists, because it reads from it; `seed` and
    `tenant_weights` are for policies that need them.
    """

    cache: KVMemory
    executor: Executor
    policy: Callable[[PolicyContext], SchedulePolicy]
    emit: Callable[[Sequence[TokenOutput]], None]
    capabilities: tuple[Capability, ...] = ()
    clock: Clock = monotonic
    seed: int = 0
    tenant_weights: Mapping[str, float] = field(default_factory=dict[str, float])


class StepSize:
    """Maximum number of tokens per step.

    Halved after a step that ran out of memory, doubled again after `RECOVER_STEPS` steps that fit.
    If `fixed`, because prompts are never split, a step that does not fit fails.
    """

    def __init__(self, limit: int, *, fixed: bool) -> None:
        self.tokens = limit
        self._limit, self._fixed = limit, fixed
        self._steps = 0

    def shrink(self, failed: Batch) -> bool:
        """Lower the limit below the failed step; False, changing nothing, if impossible."""
        whole = self._fixed or any(piece.whole for piece in failed.slices)
        if whole or failed.num_tokens < 2:
            return False
        self.tokens, self._steps = failed.num_tokens // 2, 0
        return True

    def skip(self, steps: int) -> None:
        """Count `steps` steps that fit."""
        for _ in range(steps):
            if self.tokens == self._limit:
                return
            self.on_step()

    def on_step(self) -> None:
        """Count a step that fit."""
        if self.tokens == self._limit:
            return
        self._steps += 1
        if self._steps >= RECOVER_STEPS:
            self.tokens, self._steps = min(self._limit, 2 * self.tokens), 0

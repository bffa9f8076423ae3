"""Drafts with a smaller model.

The draft model runs in a scheduler with its own pages and prefix cache. So when it drafts for a
request again, its KV is reused as far as the drafts were accepted, and is evicted or shared like
any prefix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from sylvan.protocol.errors import CapacityError, RequestError
from sylvan.protocol.messages import Finish, TokenOutput
from sylvan.protocol.requests import GenerateRequest
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.cache.build import kv_cache
from sylvan.runtime.core.req import Req
from sylvan.runtime.executor.api import Executor
from sylvan.runtime.sched.limits import SchedulerDeps, SchedulerLimits
from sylvan.runtime.sched.policies import schedule_policy
from sylvan.runtime.sched.scheduler import Scheduler

GIVEN_UP = Finish(type="abort", message="the drafter gave up")


class BatchDrafter(Protocol):
    """Drafts for several requests at once; called on the scheduler's thread.

    It may be wrong, return nonsense or raise: that only costs speed.
    """

    def write(self, counts: Mapping[Req, int]) -> Mapping[Req, Sequence[int]]:
        """Return at most this many drafts that continue the known tokens of each request."""
        ...


class DraftModel:
    """Implements `BatchDrafter`. Drafts are sampled as the request's own tokens are.

    Random numbers are keyed by seed and position, so where both models agree on probabilities
    they sample the same token.

    Args:
        executor: Executor of the smaller model; owned by this object.
        limits: Limits of a step.
        context_len: Its context length; there are no drafts for longer texts.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        limits: SchedulerLimits,
        context_len: int,
    ) -> None:
        self._executor, self._context_len = executor, context_len
        parts = SchedulerDeps(
            cache=kv_cache(executor.caps.kv_groups, "radix", "lru"),
            executor=executor,
            policy=schedule_policy("fcfs"),
            emit=self._take,
        )
        self._scheduler = Scheduler(parts, limits)
        self._drafts: dict[str, list[int]] = {}

    def write(self, counts: Mapping[Req, int]) -> Mapping[Req, Sequence[int]]:
        self._drafts = {}
        found: dict[Req, Sequence[int]] = {}
        try:
            for req, count in counts.items():
                self._add(req, count)
            while not self._scheduler.idle:
                self._scheduler.step()
        finally:
            self._scheduler.abort_all(GIVEN_UP)  # only after an error is a request left
        for req in counts:
            if tokens := self._drafts.get(req.rid):
                found[req] = tokens
        return found

    def close(self) -> None:
        """Free its memory."""
        self._executor.close()

    def _add(self, req: Req, count: int) -> None:
        request = req.request
        too_long = req.tokens.length + count > self._context_len
        if not isinstance(request, GenerateRequest) or count < 1 or too_long:
            return
        outputs = req.tokens.view(req.prompt_len, req.tokens.length).copy()
        try:
            self._scheduler.add(
                msgspec.structs.replace(
                    request,
                    output_ids=outputs,
                    sampling=_sampling(request.sampling, len(outputs) + count),
                    eos_ids=(),
                    logprobs=None,
                    thinking=None,
                    deadline_s=None,
                    ttft_ms=None,
                    tpot_ms=None,
                    interval=None,
                )
            )
        except (RequestError, CapacityError):
            return  # too long for its memory: no drafts

    def _take(self, outputs: Sequence[TokenOutput]) -> None:
        for output in outputs:
            if output.finish is None or output.finish.type != "abort":
                self._drafts.setdefault(output.rid, []).extend(output.token_ids)


def _sampling(sampling: SamplingParams, limit: int) -> SamplingParams:
    """Return the same sampling, without end tokens and grammar."""
    return msgspec.structs.replace(
        sampling,
        max_new_tokens=limit,
        min_new_tokens=0,
        ignore_eos=True,
        stop=(),
        stop_regex=(),
        stop_token_ids=(),
        json_schema=None,
        regex=None,
        ebnf=None,
        structural_tag=None,
        choice=(),
    )

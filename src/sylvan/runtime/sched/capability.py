"""The interface of capabilities such as grammars, LoRA, speculation and KV tiers.

A capability has two halves. The control half, here, decides whether a request may start, what the
worker half does in a step, and what results mean. The worker half
(`executor.capability.CapabilityWorker`) runs beside the model. They exchange data only:
`StepPlan.work` and `StepResult.reports`, by the name of the capability.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any, ClassVar, Protocol

from sylvan.protocol.errors import RequestError
from sylvan.runtime.core.req import Batch, Draft, Req, Slice
from sylvan.runtime.core.review import Review, ReviewState
from sylvan.runtime.core.step import StepPlan, StepResult


class Verdict(Enum):
    """Whether a request may start, or take part in a step.

    LOAD, only from `admit`: the request gets memory and stays in the loading phase until
    `SchedulerPort.loaded`.
    """

    READY = auto()
    WAIT = auto()
    LOAD = auto()


class SchedulerPort(Protocol):
    """Calls that a capability may make to the scheduler, on the scheduler's thread."""

    def loaded(self, rid: str, num_computed: int) -> None:
        """Start a loading request: the KV of its first `num_computed` tokens is in place."""
        ...

    def load_failed(self, rid: str) -> None:
        """Queue a loading request again; it computes its whole KV itself."""
        ...

    @property
    def completed_step(self) -> int:
        """Last step whose results arrived; nodes of later steps (`Node.computed_at`) may fail."""
        ...

    def cached_tokens(self, req: Req) -> int:
        """Tokens of a waiting request that the prefix cache holds now."""
        ...

    def release(self, rid: str) -> None:
        """Free the memory of a finished request that `Capability.holds` kept."""
        ...


class Capability:
    """Control half of a capability. Override the hooks you need; unused hooks cost nothing.

    Hooks run on the scheduler's thread and must not block: run slow work in a future and check it
    in `poll`. A hook that raises RequestError fails that request only.

    Attributes:
        name: Key of its entries in `StepPlan.work` and `StepResult.reports`.
        gates_running: Whether `gate` is also asked for running requests, in each step.
        fills: Whether `draft` returns places that the step fills, not drafts: the newest token of a
            request is then never computed without them, and memory is made for them.
        work_type: Type of its entry in `StepPlan.work`, for `core.wire`; None without one.
        report_type: Type of its entry in `StepResult.reports`; None without one.
        active: While False, `plan_work` and `on_result` are not called.
    """

    name: ClassVar[str] = ""
    gates_running: ClassVar[bool] = False
    fills: ClassVar[bool] = False
    work_type: ClassVar[Any] = None
    report_type: ClassVar[Any] = None
    active: bool = True

    def attach(self, port: SchedulerPort) -> None:
        """Called once, before anything else."""

    def poll(self) -> None:
        """Advance asynchronous work. Once per step, before the next one is planned."""

    def on_arrival(self, req: Req) -> None:
        """`req` was queued."""

    def gate(self, req: Req) -> Verdict:
        """Return READY if `req` may be scheduled in this step, else WAIT."""
        return Verdict.READY

    def admit(self, req: Req, admitted: Sequence[Req]) -> Verdict:
        """Whether `req` may start now, beside `admitted`, which own memory already.

        Called when everything else allows it. Memory may still be short: `on_start`, or `on_load`
        after LOAD, confirms the allocation.
        """
        return Verdict.READY

    def on_load(self, req: Req) -> None:
        """Called when `req` has memory for all its tokens; fill it, then call the port."""

    def stop_loading(self, req: Req) -> bool:
        """Stop filling the memory of a loading request; False while it may still be written.

        Called again in each step until it returns True.
        """
        return True

    def cache_namespace(self, req: Req) -> str:
        """Return a key that separates the KV of `req` from that of equal tokens; empty: shared."""
        return ""

    def cache_limit(self, req: Req) -> int | None:
        """The longest prefix of `req` that may come from the prefix cache; None: no limit."""
        return None

    def cut(self, req: Req, size: int, limit: int) -> int:
        """Return the size of the next slice of `req`; `size` is the default.

        At most `limit`, which may exceed `size`; 0 defers it to a step with more room.
        """
        return size

    def load_limit(self, req: Req) -> int | None:
        """The longest prefix of `req` that may be loaded from lower tiers now; None: any."""
        return None

    def may_draft(self) -> bool:
        """Whether to call `draft` in this step; without drafts, decoding takes its fast path."""
        return True

    def draft(self, req: Req, limit: int) -> Draft | None:
        """Return draft tokens to verify in this step after the known tokens."""
        return None

    def wants_step(self) -> bool:
        """Whether the worker half needs a step even if there are no slices; no side effects.

        If so, a step without slices is launched, and `plan_work` is called as usual.
        """
        return False

    def wants_step_soon(self) -> bool:
        """Whether a request waits for a report that may arrive at any moment; no side effects.

        While True, empty steps run about every millisecond.
        """
        return False

    def plan_work(self, batch: Batch) -> Any:
        """Return the data for the worker half in this step, or None; `batch` may be empty."""
        return None

    def on_batch(self, batch: Batch) -> None:
        """Called with the batch of each step; it may be empty."""

    def on_start(self, piece: Slice) -> None:
        """`piece` is the first slice of a request that waited, also after it was retracted."""

    def on_result(self, batch: Batch, report: Any) -> None:
        """Called after each step, even if it sampled nothing, before its tokens are appended.

        `report` is the worker half's report, or None.
        """

    def on_tokens(self, req: Req, tokens: Sequence[int]) -> None:
        """Called after `tokens` were appended to `req`."""

    def reviews(self, req: Req) -> bool:
        """Whether `review` must see the tokens of `req`, which is about to start."""
        return False

    def review(self, req: Req, count: int, *, complete: bool) -> Review:
        """Decide how many of the newest `count` tokens of `req`, not emitted yet, may be emitted.

        Args:
            req: A request under review.
            count: Number of tokens.
            complete: The output ends with these tokens.

        Raises:
            RequestError: the request must fail; tokens not approved are never sent.
        """
        raise NotImplementedError

    def output_fields(self, req: Req) -> Mapping[str, Any] | None:
        """Fields to add to `TokenOutput` for the client; called with each first output."""
        return None

    def on_finish(self, req: Req) -> None:
        """`req` has ended; drop the state kept for it."""

    def holds(self, req: Req) -> bool:
        """Whether the finished `req` keeps its memory until `SchedulerPort.release`."""
        return False


class Observer(Capability):
    """A capability that observes a scheduler without changing anything."""

    def on_call(self, method: str, arguments: tuple[Any, ...]) -> None:
        """Called before a public method of the scheduler or the port."""

    def on_decision(self, question: str, req: Req | None, answer: Any) -> None:
        """Called with the capabilities' joint answer to `question` ("gate", "admit", ...).

        `req` is None for questions about no request ("wants_step", "may_draft").
        """

    def on_plan(self, plan: StepPlan) -> None:
        """Called when `plan` is sent to the executor."""

    def on_completed(self, result: StepResult | Exception) -> None:
        """Called when the oldest step in flight returned `result`, or failed."""

    def on_step_end(self) -> None:
        """Called after each iteration of the scheduler."""


def overriding(capabilities: Sequence[Capability], hook: str) -> tuple[Capability, ...]:
    """Capabilities that override `hook`."""
    base = getattr(Capability, hook)
    return tuple(c for c in capabilities if getattr(type(c), hook) is not base)


class Hooks:
    """Calls each hook of the capabilities that override it."""

    def __init__(self, capabilities: Sequence[Capability]) -> None:
        self._pollers = overriding(capabilities, "poll")
        self._greeters = overriding(capabilities, "on_arrival")
        self._gates = overriding(capabilities, "gate")
        self._running_gates = tuple(c for c in self._gates if c.gates_running)
        self._admitters = overriding(capabilities, "admit")
        self._loaders = overriding(capabilities, "on_load")
        self._load_stoppers = overriding(capabilities, "stop_loading")
        self._namespaces = overriding(capabilities, "cache_namespace")
        self._cache_limits = overriding(capabilities, "cache_limit")
        self._load_limits = overriding(capabilities, "load_limit")
        self._cutters = overriding(capabilities, "cut")
        self._drafters = overriding(capabilities, "draft")
        self._step_wanters = overriding(capabilities, "wants_step")
        self._soon_steppers = overriding(capabilities, "wants_step_soon")
        self._planners = overriding(capabilities, "plan_work")
        self._batch_watchers = overriding(capabilities, "on_batch")
        self._starters = overriding(capabilities, "on_start")
        self._result_watchers = overriding(capabilities, "on_result")
        self._followers = overriding(capabilities, "on_tokens")
        self._reviewers = overriding(capabilities, "review")
        self._output_fields = overriding(capabilities, "output_fields")
        self._finishers = overriding(capabilities, "on_finish")
        self._holders = overriding(capabilities, "holds")
        self._observers = tuple(c for c in capabilities if isinstance(c, Observer))
        self.observed = bool(self._observers)
        self.polls = bool(self._pollers)  # steps skip hooks that no capability overrides
        self.watches_batches = bool(self._batch_watchers)
        self.follows_tokens = bool(self._followers)
        self.adds_output_fields = bool(self._output_fields)
        self.gates_running = bool(self._running_gates)
        self.drafts = bool(self._drafters)
        self.limits_cache = bool(self._cache_limits)
        self.fills = any(c.fills for c in capabilities)

    @property
    def questions(self) -> tuple[str, ...]:
        """Queries that at least one capability answers."""
        found = {
            "gate": self._gates,
            "running gate": self._running_gates,
            "admit": self._admitters,
            "may_draft": self._drafters,
            "draft": self._drafters,
            "cut": self._cutters,
            "holds": self._holders,
            "stop_loading": self._load_stoppers,
            "wants_step": self._step_wanters,
            "reviews": self._reviewers,
            "review": self._reviewers,
        }
        return tuple(question for question, answering in found.items() if answering)

    # ---- decisions

    def may_run(self, req: Req, *, running: bool) -> bool:
        """Whether every gate admits `req` to this step.

        Raises:
            RequestError: a capability rejects it.
        """
        gates = self._running_gates if running else self._gates
        if not gates:
            return True
        try:
            ready = all(gate.gate(req) is Verdict.READY for gate in gates)
        except RequestError as error:
            self._observe("gate", req, error)
            raise
        self._observe("gate", req, ready)
        return ready

    def admit(self, req: Req, admitted: Sequence[Req]) -> Verdict:
        """Return the most restrictive verdict.

        Raises:
            RequestError: a capability rejects the request.
        """
        if not self._admitters:
            return Verdict.READY
        found = Verdict.READY
        try:
            for capability in self._admitters:
                verdict = capability.admit(req, admitted)
                if verdict is Verdict.WAIT:
                    found = verdict
                    break
                found = verdict if verdict is Verdict.LOAD else found
        except RequestError as error:
            self._observe("admit", req, error)
            raise
        self._observe("admit", req, found)
        return found

    def stop_loading(self, req: Req) -> bool:
        """Whether no capability fills the memory of `req` any more."""
        if not self._load_stoppers:
            return True
        answers = [c.stop_loading(req) for c in self._load_stoppers]  # call every one
        stopped = all(answers)
        self._observe("stop_loading", req, stopped)
        return stopped

    def cache_namespace(self, req: Req) -> str:
        """Combined namespace of `req` from all capabilities."""
        parts = (c.cache_namespace(req) for c in self._namespaces)
        return "".join(f"|{part}" for part in parts if part)

    def cache_limit(self, req: Req, limit: int) -> int:
        """Minimum of `limit` and the limits of capabilities."""
        for capability in self._cache_limits:
            own = capability.cache_limit(req)
            limit = limit if own is None else min(limit, own)
        return limit

    def cut(self, req: Req, size: int, limit: int) -> int:
        """The size of the next slice of `req`; `size` unless a capability changes it."""
        if not self._cutters:
            return size
        for capability in self._cutters:
            size = capability.cut(req, size, limit)
        self._observe("cut", req, size)
        return size

    def load_limit(self, req: Req, limit: int) -> int:
        """Minimum of `limit` and the load limits of capabilities."""
        for capability in self._load_limits:
            own = capability.load_limit(req)
            limit = limit if own is None else min(limit, own)
        return limit

    def may_draft(self) -> bool:
        """Whether any capability wants to draft in this step."""
        if not self._drafters:
            return False
        wanted = any(c.may_draft() for c in self._drafters)
        self._observe("may_draft", None, wanted)
        return wanted

    def draft(self, req: Req, limit: int) -> Draft | None:
        """Return the draft tokens of the first capability that has any."""
        draft = next((d for c in self._drafters if (d := c.draft(req, limit))), None)
        self._observe("draft", req, draft)
        return draft

    def holds(self, req: Req) -> bool:
        """Whether any capability holds the memory of a finished request."""
        if not self._holders:
            return False
        answers = [c.holds(req) for c in self._holders]  # call every one
        held = any(answers)
        self._observe("holds", req, held)
        return held

    @property
    def busy(self) -> bool:
        """Whether any worker half has work pending."""
        return any(c.wants_step() for c in self._step_wanters)

    def wants_step_soon(self) -> bool:
        """Whether a request waits for a report of any worker half."""
        return any(c.wants_step_soon() for c in self._soon_steppers)

    def wants_step(self) -> bool:
        """Whether to launch a step without slices."""
        if not self._step_wanters:
            return False
        wanted = self.busy
        self._observe("wants_step", None, wanted)
        return wanted

    def review(self, req: Req, count: int, *, complete: bool) -> Review:
        """How many tokens all reviewing capabilities approve: the minimum.

        Raises:
            RequestError: a capability rejects the request.
        """
        length = req.tokens.length
        found = Review(length, length)
        try:
            for capability in self._reviewers:
                if capability.reviews(req):
                    own = capability.review(req, count, complete=complete)
                    found = Review(min(found.kept, own.kept), min(found.final, own.final))
        except RequestError as error:
            self._observe("review", req, error)
            raise
        self._observe("review", req, found)
        return found

    # ---- the data halves

    def plan_work(self, batch: Batch) -> dict[str, Any]:
        """Collect data for the worker halves, by capability name."""
        work: dict[str, Any] = {}
        for capability in self._planners:
            if capability.active and (own := capability.plan_work(batch)) is not None:
                work[capability.name] = own
        return work

    def on_result(self, batch: Batch, result: StepResult) -> None:
        """Pass the worker halves' reports to their capabilities."""
        reports = result.reports
        for capability in self._result_watchers:
            if capability.active:
                capability.on_result(batch, reports.get(capability.name))

    def output_fields(self, req: Req) -> dict[str, Any]:
        """Fields that capabilities add to an output of `req`."""
        found: dict[str, Any] = {}
        for capability in self._output_fields:
            found |= capability.output_fields(req) or {}
        return found

    # ---- notifications

    def on_arrival(self, req: Req) -> None:
        for capability in self._greeters:
            capability.on_arrival(req)

    def poll(self) -> None:
        for capability in self._pollers:
            capability.poll()

    def launch(self, batch: Batch, started: Sequence[Slice]) -> None:
        """See `Capability.on_start` and `Capability.on_batch`."""
        for capability in self._starters if started else ():
            for piece in started:
                capability.on_start(piece)
        for piece in started if self._reviewers else ():
            self._hold(piece.req)
        for capability in self._batch_watchers:
            capability.on_batch(batch)

    def on_load(self, req: Req) -> None:
        for capability in self._loaders:
            capability.on_load(req)

    def on_tokens(self, req: Req, tokens: Sequence[int]) -> None:
        for capability in self._followers:
            capability.on_tokens(req, tokens)

    def on_finish(self, req: Req) -> None:
        for capability in self._finishers:
            capability.on_finish(req)

    def on_call(self, method: str, *arguments: Any) -> None:
        for capability in self._observers:
            capability.on_call(method, arguments)

    def on_plan(self, plan: StepPlan) -> None:
        for capability in self._observers:
            capability.on_plan(plan)

    def on_completed(self, result: StepResult | Exception) -> None:
        for capability in self._observers:
            capability.on_completed(result)

    def on_step_end(self) -> None:
        for capability in self._observers:
            capability.on_step_end()

    def _hold(self, req: Req) -> None:
        """Hold back the output of a starting request that is under review."""
        if req.review is None and req.generates:
            reviewed = any(c.reviews(req) for c in self._reviewers)
            self._observe("reviews", req, reviewed)
            req.review = ReviewState(req.tokens.length) if reviewed else None

    def _observe(self, question: str, req: Req | None, answer: Any) -> None:
        for capability in self._observers:
            capability.on_decision(question, req, answer)

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest

from sylvan.protocol.messages import (
    Abort,
    CacheRequest,
    Control,
    ControlReply,
    Finish,
    FlushCache,
    FlushText,
    GetState,
    Heartbeat,
    Pause,
    Resume,
    SchedulerLoad,
    Shutdown,
    StartDetokenizing,
    StopFound,
    Submit,
    TokenBatch,
    TokenOutput,
)
from sylvan.protocol.requests import EmbedRequest, GenerateRequest
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.cache.eviction import eviction_policy
from sylvan.runtime.cache.manager import KVCacheManager
from sylvan.runtime.cache.pages import PageAllocator
from sylvan.runtime.cache.radix import RadixCache
from sylvan.runtime.core.step import StepPlan
from sylvan.runtime.engine.engine_core import EngineCore
from sylvan.runtime.engine.scheduler_loop import AUDIT_S, HEARTBEAT_S, Ports, SchedulerLoop
from sylvan.runtime.engine.throughput import ThroughputMeter
from sylvan.runtime.executor.sim import SimExecutor
from sylvan.runtime.sched.capability import Capability, Verdict
from sylvan.runtime.sched.limits import SchedulerDeps, SchedulerLimits
from sylvan.runtime.sched.policies import schedule_policy
from sylvan.runtime.sched.scheduler import Scheduler
from sylvan.transport.api import MessageError
from sylvan.utils.clock import VirtualClock


@dataclass
class Wire:
    """An end that keeps what is sent, and gives out what it was filled with."""

    clock: VirtualClock
    sent: list[Any] = field(default_factory=list)
    waiting: deque[Any] = field(default_factory=deque)
    waits: list[float] = field(default_factory=list)

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def receive(self, timeout_s: float = 0.0) -> Any:
        if not self.waiting:
            self.waits.append(timeout_s)
            self.clock.advance(timeout_s)
            return None
        message = self.waiting.popleft()
        if isinstance(message, Exception):
            raise message
        return message

    def close(self) -> None:
        """Nothing to let go of."""


class Fixture:
    def __init__(
        self,
        next_token: Callable[[GenerateRequest, int], int] | None = None,
        capabilities: Sequence[Capability] = (),
        inbox: type[Wire] | None = None,
        step_s: float = 0.0,
        **options: Any,
    ) -> None:
        clock = VirtualClock()
        self.inbox, self.text, self.replies = (inbox or Wire)(clock), Wire(clock), Wire(clock)
        ports = Ports(self.inbox, self.text, self.replies)
        self.executor = Fragile(next_token or (lambda req, position: position % 7), self._take)
        self.step_s = step_s
        self.clock, self.allocator = clock, PageAllocator(33, 4)
        self.cache = KVCacheManager(self.allocator, RadixCache(4, eviction_policy("lru")))
        parts = SchedulerDeps(
            cache=self.cache,
            executor=self.executor,
            policy=schedule_policy("fcfs"),
            emit=ports.emit,
            clock=clock,
            capabilities=tuple(capabilities),
        )
        limits = SchedulerLimits(max_running_reqs=4, max_waiting_reqs=6)
        self.scheduler = Scheduler(parts, limits)
        self.rests: list[float] = []
        built = EngineCore(
            self.scheduler,
            **{
                "facts": {},
                "state": lambda: {"a": 1},
                "inspect": lambda command: None,
                "executor": self.executor,
                "close": lambda: None,
            }
            | options,
        )
        self.loop = SchedulerLoop(
            built, ports, clock=clock, on_idle=lambda: self.rests.append(clock())
        )

    def _take(self, plan: StepPlan) -> float:
        self.clock.advance(self.step_s)
        return self.step_s

    def send(self, *messages: Any) -> None:
        self.inbox.waiting.extend(messages)

    def run(self, steps: int = 50) -> None:
        for _ in range(steps):
            if not self.loop.pump():
                return

    def outputs(self, rid: str) -> list[TokenOutput]:
        batches = [m for m in self.text.sent if isinstance(m, TokenBatch)]
        return [o for batch in batches for o in batch.outputs if o.rid == rid]

    def tokens(self, rid: str) -> list[int]:
        return [token for output in self.outputs(rid) for token in output.token_ids]

    def pieces(self, rid: str) -> list[int]:
        return [len(output.token_ids) for output in self.outputs(rid)]


class Fragile(SimExecutor):
    """Raises while `broken`."""

    broken: Exception | None = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.plans: list[StepPlan] = []

    def launch(self, plan: StepPlan) -> Any:
        self.plans.append(plan)
        if self.broken is not None:
            raise self.broken
        return super().launch(plan)


def submit(rid: str, prompt_len: int = 3, interval: int | None = 1, **sampling: Any) -> Submit:
    return Submit(
        request=GenerateRequest(
            interval=interval,
            rid=rid,
            input_ids=np.arange(prompt_len, dtype=np.int32),
            output_ids=np.empty(0, np.int32),
            sampling=SamplingParams(**({"max_new_tokens": 5} | sampling)),
        )
    )


def test_a_request_is_opened_served_and_ended() -> None:
    fix = Fixture()
    fix.send(submit("a", stop=("x",), no_stop_trim=True))
    fix.run()

    opened = fix.text.sent[0]
    assert opened == StartDetokenizing(
        rid="a", prompt_tail_ids=(0, 1, 2), stop=("x",), no_stop_trim=True
    )
    assert fix.tokens("a") == [3, 4, 5, 6, 0]
    assert fix.outputs("a")[-1].finish == Finish(type="length", length=5)


class Burst(Wire):
    """A wire on which each message comes `gap_s` after the one before was taken."""

    gap_s = 0.0

    def receive(self, timeout_s: float = 0.0) -> Any:
        if self.waiting and timeout_s < self.gap_s:
            self.clock.advance(timeout_s)
            return None
        if self.waiting:
            self.clock.advance(self.gap_s)
        return super().receive(timeout_s)


@pytest.mark.parametrize(
    ("step_s", "gap_s", "together"),
    [(0.1, 0.0005, 3), (0.1, 0.002, 1), (0.005, 0.0005, 1)],
    ids=["burst", "others come later", "short steps"],
)
def test_an_idle_scheduler_of_long_steps_waits_for_the_rest_of_a_burst(
    step_s: float, gap_s: float, together: int
) -> None:
    fix = Fixture(inbox=Burst, step_s=step_s)
    fix.send(submit("first"))
    fix.run()
    fix.inbox.gap_s = gap_s
    fix.send(*(submit(rid) for rid in "abc"))
    fix.executor.plans.clear()
    while not fix.executor.plans:
        fix.loop.pump()

    assert fix.executor.plans[0].num_slices == together


def test_an_endless_burst_holds_no_step_up() -> None:
    fix = Fixture(inbox=Burst, step_s=1.0)
    fix.send(submit("first"))
    fix.run()
    fix.inbox.gap_s = 0.0009
    fix.send(*(submit(str(number)) for number in range(100)))
    fix.executor.plans.clear()
    while not fix.executor.plans:
        fix.loop.pump()

    assert fix.executor.plans[0].num_slices == 4  # its limit
    assert len(fix.inbox.waiting) > 80


def test_only_the_tail_of_the_prompt_goes_to_the_detokenizer() -> None:
    fix = Fixture()
    fix.send(submit("a", prompt_len=40))
    fix.run(1)

    assert fix.text.sent[0].prompt_tail_ids == tuple(range(24, 40))


def test_a_stop_ends_the_request_and_frees_its_memory() -> None:
    fix = Fixture()
    fix.send(submit("a", max_new_tokens=60, stop=("x",)))
    fix.run(5)
    fix.send(StopFound(rid="a", num_tokens=2, matched="x"))
    fix.run(2)
    count = len(fix.tokens("a"))
    fix.run()

    assert len(fix.tokens("a")) == count
    assert fix.cache.used_tokens == 0


@pytest.mark.parametrize(
    ("interval", "pieces"), [(1, [1] * 8), (3, [1, 3, 3, 1]), (100, [1, 7]), (None, [1, 7])]
)
def test_tokens_are_emitted_together_after_the_first(
    interval: int | None, pieces: list[int]
) -> None:
    fix = Fixture()
    fix.send(submit("a", max_new_tokens=8, interval=interval))
    fix.run()

    assert fix.pieces("a") == pieces
    assert fix.tokens("a") == [3, 4, 5, 6, 0, 1, 2, 3]
    assert [o.usage.completion_tokens for o in fix.outputs("a")] == np.cumsum(pieces).tolist()
    assert fix.text.sent[0].interval == interval


def test_who_may_find_a_stop_sees_each_token() -> None:
    fix = Fixture()
    fix.send(submit("a", stop=("x",), interval=None), submit("b", stop_regex=("x",), interval=4))
    fix.run()

    assert fix.pieces("a") == fix.pieces("b") == [1] * 5


def test_a_heartbeat_tells_what_was_kept_back() -> None:
    fix = Fixture()
    fix.send(submit("a", max_new_tokens=60, interval=None), submit("b", interval=60))
    fix.run(11)
    assert fix.pieces("a") == [1]
    fix.clock.advance(HEARTBEAT_S)
    fix.run(1)

    assert fix.pieces("a") == [1, 9]
    assert fix.pieces("b") == [1, 4]
    assert isinstance(fix.replies.sent[-1], Heartbeat)
    assert sum(isinstance(message, FlushText) for message in fix.text.sent) == 1
    fix.run(100)
    assert len(fix.tokens("a")) == 60
    sent = len(fix.text.sent)
    fix.run(10)
    assert len(fix.text.sent) == sent  # nothing when idle


def test_an_abort_tells_what_was_kept_back() -> None:
    fix = Fixture()
    fix.send(submit("a", max_new_tokens=60, interval=None))
    fix.run(7)
    fix.send(Abort(rid="a"))
    fix.run(2)

    assert fix.pieces("a") == [1, 5]
    assert fix.outputs("a")[-1].finish == Abort(rid="a").finish


def test_an_abort_ends_the_request() -> None:
    fix = Fixture()
    fix.send(submit("a", max_new_tokens=60))
    fix.run(3)
    fix.send(Abort(rid="a", finish=Finish(type="abort", message="gone")), Abort(rid="unknown"))
    fix.run()

    assert fix.outputs("a")[-1].finish == Finish(type="abort", message="gone")
    assert fix.cache.used_tokens == 0
    assert fix.loop.idle


def test_requests_that_cannot_be_served_fail_alone() -> None:
    fix = Fixture()
    fix.send(submit("big", prompt_len=500), submit("ok"), submit("ok"))
    fix.run()

    refused = fix.outputs("big")[0].finish
    assert refused is not None
    assert (refused.type, refused.status, refused.param) == ("abort", 400, "max_new_tokens")
    assert "rid" in str(fix.outputs("ok")[0].finish)  # the second of that name
    assert fix.tokens("ok") == [3, 4, 5, 6, 0]


def test_a_full_queue_is_a_503() -> None:
    fix = Fixture()
    fix.send(*(submit(f"r{i}") for i in range(8)))
    fix.run()

    statuses = [f.status for i in range(8) if (f := fix.outputs(f"r{i}")[-1].finish)]
    assert statuses == [None] * 6 + [503] * 2


def test_malformed_messages_are_dropped() -> None:
    fix = Fixture()
    fix.send(MessageError("bad"), submit("a"), MessageError("bad"))
    fix.run()

    assert len(fix.tokens("a")) == 5


def test_a_request_that_breaks_on_arrival_fails_alone() -> None:
    fix = Fixture()
    broken = Submit(
        request=EmbedRequest(rid="b", input_ids=None)  # type: ignore[arg-type]
    )
    fix.send(broken, submit("a"))
    fix.run()

    finish = fix.outputs("b")[0].finish
    assert finish is not None
    assert finish.status == 500
    assert len(fix.tokens("a")) == 5


def test_a_step_that_raises_fails_what_ran_and_the_next_request_is_served() -> None:
    fix = Fixture()
    fix.send(submit("a", max_new_tokens=60))
    fix.run(3)
    fix.executor.broken = RuntimeError("boom")
    fix.run(1)
    fix.executor.broken = None
    fix.send(submit("b"))
    fix.run()

    finish = fix.outputs("a")[-1].finish
    assert finish is not None
    assert (finish.type, finish.status) == ("abort", 500)
    assert len(fix.tokens("b")) == 5
    assert fix.cache.used_tokens == 0


def test_a_scheduler_that_keeps_raising_is_given_up() -> None:
    fix = Fixture()
    fix.executor.broken = RuntimeError("boom")
    for i in range(2):
        fix.send(submit(f"r{i}"))
        fix.run(1)
    fix.send(submit("last"))

    with pytest.raises(RuntimeError, match="boom"):
        fix.run(1)


def test_heartbeats_come_when_idle_and_when_busy() -> None:
    fix = Fixture()
    for _ in range(10):
        fix.loop.pump()

    beats = [m for m in fix.replies.sent if isinstance(m, Heartbeat)]
    assert len(beats) == 10
    assert fix.inbox.waits == pytest.approx([HEARTBEAT_S] * 10)


def test_heartbeats_tell_tokens_a_second() -> None:
    meter = ThroughputMeter(10.0)
    told = [
        meter.with_rates(SchedulerLoad(generated_tokens=tokens), now)
        for tokens, now in ((0, 10.0), (0, 10.5), (60, 12.5), (61, 12.5), (71, 13.0), (71, 13.5))
    ]

    assert [load.gen_throughput for load in told] == [0, 0, 30, 30, 22, 0]
    assert [load.last_gen_throughput for load in told] == [0, 0, 30, 30, 22, 22]
    fix = Fixture()
    fix.send(submit("a"))
    fix.run()
    last = [m for m in fix.replies.sent if isinstance(m, Heartbeat)][-1].load
    assert last.gen_throughput == 0
    assert last.last_gen_throughput > 0


def test_an_idle_loop_does_not_spin() -> None:
    fix = Fixture()
    fix.send(submit("a"))
    fix.run(20)
    fix.inbox.waits.clear()
    fix.run(20)

    assert fix.inbox.waits == pytest.approx([HEARTBEAT_S] * 20)


def test_idleness_is_reported_once() -> None:
    fix = Fixture()
    fix.run(10)
    assert fix.rests == []  # nothing was done
    fix.send(submit("a"))
    while not fix.outputs("a") or fix.outputs("a")[-1].finish is None:
        fix.loop.pump()
    ended = fix.clock()

    fix.run(20)
    assert len(fix.rests) == 1
    assert fix.rests[0] >= ended + HEARTBEAT_S

    fix.send(submit("b"))
    fix.run(20)
    assert len(fix.rests) == 2


def test_the_load_is_reported_when_work_ends() -> None:
    fix = Fixture()
    fix.send(submit("a"))
    fix.run(12)

    assert fix.replies.sent[-1].load.generated_tokens == 5
    assert fix.replies.sent[-1].load.num_running_reqs == 0


def test_a_lost_page_is_taken_back_when_work_ends_and_counted_in_the_heartbeat() -> None:
    fix = Fixture()
    fix.send(submit("a"))
    fix.run(2)
    assert fix.allocator.alloc(1) is not None  # a bug
    fix.run(20)

    assert fix.replies.sent[-1].load.repaired_pages == 1
    assert fix.replies.sent[-1].load.num_used_tokens == 0


def test_a_lost_page_is_taken_back_while_requests_run() -> None:
    fix = Fixture()
    fix.send(submit("a", max_new_tokens=60))
    fix.run(3)
    assert fix.allocator.alloc(2) is not None  # a bug
    fix.run(3)
    assert fix.scheduler.load().repaired_pages == 0

    fix.clock.advance(AUDIT_S)
    fix.run(2)
    assert fix.scheduler.running
    assert fix.replies.sent[-1].load.repaired_pages == 2
    fix.run(100)
    assert len(fix.tokens("a")) == 60


def test_commands_are_answered_after_all_other_messages() -> None:
    fix = Fixture()
    fix.send(submit("a", max_new_tokens=60, stop=("x",)))
    fix.run(5)
    fix.send(Control(id=1, command=FlushCache()))
    fix.run(1)
    fix.send(
        Control(id=2, command=FlushCache()),
        StopFound(rid="a", num_tokens=2, matched="x"),
    )
    fix.run(1)

    replies = {m.id: m for m in fix.replies.sent if isinstance(m, ControlReply)}
    assert not replies[1].ok
    assert replies[1].message
    assert replies[2].ok


def test_pause_and_resume() -> None:
    fix = Fixture()
    fix.send(submit("a", max_new_tokens=60))
    fix.run(5)
    fix.send(Control(id=1, command=Pause(mode="in_place")))
    fix.run(1)
    assert loads(fix)[-1].paused  # reported before the reply, so that clients see it at once
    assert isinstance(fix.replies.sent[-1], ControlReply)
    count = len(fix.tokens("a"))
    fix.inbox.waits.clear()
    fix.run(30)
    assert len(fix.tokens("a")) == count
    assert max(fix.inbox.waits) <= 0.05  # not idle, but not spinning either
    assert sum(wait >= 0.04 for wait in fix.inbox.waits) > 20

    fix.send(Control(id=2, command=Resume()))
    fix.run(100)
    assert len(fix.tokens("a")) == 60
    assert not loads(fix)[-1].paused


class Waiting(Capability):
    """Lets no request run, as during a fetch."""

    hurried = True

    def gate(self, req: Any) -> Verdict:
        return Verdict.WAIT

    def wants_step_soon(self) -> bool:
        return self.hurried


def test_reports_that_requests_wait_for_are_taken_in_soon() -> None:
    fix = Fixture(capabilities=[waiting := Waiting()])
    fix.send(submit("a"))
    fix.run()
    assert max(fix.inbox.waits[5:]) <= 0.001
    waiting.hurried = False
    fix.run()
    assert fix.inbox.waits[-1] == pytest.approx(0.05)


def loads(fix: Fixture) -> list[SchedulerLoad]:
    return [m.load for m in fix.replies.sent if isinstance(m, Heartbeat)]


def test_heartbeats_count_requests_that_wait_for_grammars() -> None:
    counts = {"num_grammar_reqs": 3, "grammar_tries": 5, "grammar_taken_back": 40}
    fix = Fixture(grammar_counts=lambda: counts)
    fix.run(2)

    load = loads(fix)[-1]
    assert {name: getattr(load, name) for name in counts} == counts


def test_a_request_whose_shared_parameters_were_dropped_fails_alone() -> None:
    fix = Fixture()
    lost = Submit(request=submit("a").request, params=3)
    fix.send(MessageError("the parameters of slot 3"), lost, submit("b"))
    fix.run()

    [output] = fix.outputs("a")
    assert output.finish is not None
    assert (output.finish.type, output.finish.status) == ("abort", 500)
    starts = [m.rid for m in fix.text.sent if isinstance(m, StartDetokenizing)]
    assert starts == ["a", "b"]  # a finish of an unknown sample would be dropped
    assert len(fix.tokens("b")) == 5


class Defragment(msgspec.Struct, frozen=True, tag="defragment"):
    """A command of some later version."""


def test_an_unknown_command_is_an_error_and_nothing_else() -> None:
    fix = Fixture()
    fix.send(submit("a", max_new_tokens=20), Control(id=7, command=Defragment()))
    fix.run()

    [reply] = (m for m in fix.replies.sent if isinstance(m, ControlReply))
    assert (reply.id, reply.ok) == (7, False)
    assert reply.message == "unknown command Defragment"
    assert len(fix.tokens("a")) == 20
    assert fix.loop.pump()


def test_a_command_that_fails_is_an_error_and_nothing_else() -> None:
    def broken() -> dict[str, Any]:
        raise RuntimeError("boom")

    fix = Fixture(state=broken)
    fix.send(Control(id=1, command=GetState()), Control(id=2, command=FlushCache()), submit("a"))
    fix.run()

    state, flush = (m for m in fix.replies.sent if isinstance(m, ControlReply))
    assert (state.id, state.ok, state.body) == (1, False, None)
    assert "failed" in state.message
    assert (flush.id, flush.ok) == (2, False)  # a request waits
    assert len(fix.tokens("a")) == 5


def test_a_question_about_the_cache_without_an_answer_is_an_error() -> None:
    fix = Fixture()
    fix.send(Control(id=1, command=CacheRequest(rid="a")))
    fix.run(1)

    [reply] = (m for m in fix.replies.sent if isinstance(m, ControlReply))
    assert not reply.ok
    assert reply.message


def test_state_and_shutdown() -> None:
    fix = Fixture()
    fix.send(Control(id=1, command=GetState()), Control(id=2, command=Shutdown()))
    fix.run()

    state, shutdown = (m for m in fix.replies.sent if isinstance(m, ControlReply))
    assert state.body is not None
    assert state.body["a"] == 1
    assert state.body["load"]["num_running_reqs"] == 0
    assert shutdown == ControlReply(id=2, ok=True)
    assert not fix.loop.pump()

"""A recording replays decision for decision, and shows the first that differs."""

from __future__ import annotations

import itertools
import random
from dataclasses import asdict, replace

import msgspec
import pytest

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.core.req import Req
from sylvan.runtime.features.flight_recorder.control import FlightRecorder
from sylvan.runtime.features.flight_recorder.recording import (
    Completed,
    Recorder,
    SchedulerSetup,
    read,
    runs,
)
from sylvan.runtime.features.flight_recorder.replay import replay
from sylvan.runtime.features.speculation.control import Speculation
from sylvan.runtime.sched.capability import Capability, Hooks, Verdict
from sylvan.runtime.sched.limits import SchedulerLimits
from sylvan.runtime.sched.policies import schedule_policy
from sylvan.runtime.sched.scheduler import Scheduler
from tests.support.drafters import ScriptedDrafter
from tests.support.kv import VOCAB, World, alone, request


class Moody(Capability):
    """Makes some requests wait; not a function of what a replay could know."""

    def __init__(self) -> None:
        self._random = random.Random(5)

    def gate(self, req: Req) -> Verdict:
        return self._random.choice([Verdict.READY, Verdict.READY, Verdict.WAIT])


def record(folder, *, policy="lpm", pages=16, capabilities=(), inflight=2, weights=None) -> World:
    limits = SchedulerLimits(
        max_batch_tokens=16, chunk_tokens=8, max_running_reqs=4, inflight=inflight, age_limit_s=0.3
    )
    world = World(pages=pages, page_size=4, capabilities=capabilities)
    parts = world.scheduler._deps
    setup = SchedulerSetup(
        kv_groups=world.executor.caps.kv_groups,
        prefix="radix",
        eviction="lru",
        policy=policy,
        seed=3,
        limits=asdict(limits),
        questions=Hooks(parts.capabilities).questions,
        num_slots=world.executor.caps.max_running_reqs,
        draft_chains=world.executor.caps.draft_chains,
        draft_trees=world.executor.caps.draft_trees,
        makes_vectors=True,
        tenant_weights=weights or {},
    )
    flight = FlightRecorder(Recorder(folder, setup))
    parts = replace(
        parts,
        policy=schedule_policy(policy),
        capabilities=(*parts.capabilities, flight),
        clock=flight.clock(parts.clock),
        seed=3,
        tenant_weights=weights or {},
    )
    world.scheduler = Scheduler(parts, limits)
    rng = random.Random(1)
    todo = [
        request(
            str(i),
            [i % 3] * 6 + [i],
            new=rng.randrange(1, 9),
            tenant=str(i % 2),
            tpot_ms=25.0 if i % 4 else None,
        )
        for i in range(30)
    ]
    for number, req in enumerate(todo):
        world.scheduler.add(req)
        world.clock.advance(0.02)
        world.scheduler.step()
        if number == 10:
            world.scheduler.abort("9")
        if number == 20:
            world.scheduler.pause("retract")
            world.scheduler.resume()
        if number == 25:
            world.scheduler.pause("in_place")
            world.scheduler.forget_kv()
            world.scheduler.resume()
    world.run()
    flight.close()
    for req in todo:
        assert req.rid == "9" or world.tokens[req.rid] == alone(req)
    return world


def replace_limits(setup: SchedulerSetup, **changed) -> SchedulerSetup:
    return msgspec.structs.replace(setup, limits=setup.limits | changed)


def test_replay_knows_the_weights_of_tenants(tmp_path):
    record(tmp_path, policy="vtc", weights={"0": 8.0})

    assert replay(tmp_path).difference == ""


@pytest.mark.parametrize("policy", ["lpm", "fcfs", "random", "vtc", "slo", "hrrn"])
@pytest.mark.parametrize("inflight", [1, 2])
def test_replay_decides_the_same(tmp_path, policy, inflight):
    world = record(tmp_path, policy=policy, inflight=inflight)
    outcome = replay(tmp_path)

    assert outcome.difference == ""
    assert outcome.requests == 30
    assert outcome.tokens == sum(len(t) for t in world.tokens.values())


class Restless(Moody):
    """Wants steps without slices now and then."""

    def __init__(self) -> None:
        super().__init__()
        self._polls = 0

    def poll(self) -> None:
        self._polls += 1

    def wants_step(self) -> bool:
        return 3 < self._polls % 20 < 9 and self._polls < 300


class Cutting(Moody):
    """Wants slices of other sizes."""

    def cut(self, req: Req, size: int, most: int) -> int:
        return self._random.randint(1, min(most, req.lacking))


@pytest.mark.parametrize("capability", [Moody, Restless, Cutting])
def test_replay_repeats_what_capabilities_answered(tmp_path, capability):
    record(tmp_path, capabilities=(capability(),))
    assert replay(tmp_path).difference == ""


@pytest.mark.parametrize("adaptive", [False, True])
def test_replay_repeats_drafts(tmp_path, adaptive):
    """Which of them were right is in the results; how long steps took is nowhere."""
    speculation = Speculation(ScriptedDrafter("half", 3), 4, VOCAB, adaptive=adaptive)
    world = record(tmp_path, capabilities=(speculation,), inflight=1)

    assert world.scheduler.load().accepted_draft_tokens > 0
    assert replay(tmp_path).difference == ""


def test_replay_shows_the_first_difference(tmp_path):
    record(tmp_path)
    setup = msgspec.json.decode(
        (tmp_path / "run-1" / "setup.json").read_bytes(), type=SchedulerSetup
    )
    other = replace_limits(setup, chunk_tokens=3)
    (tmp_path / "run-1" / "setup.json").write_bytes(msgspec.json.encode(other))

    outcome = replay(tmp_path)
    assert outcome.difference.startswith("step 1: planned slot 0[0:3]")
    assert "recorded slot 0[0:7]" in outcome.difference


def test_replay_stops_at_a_given_step(tmp_path):
    record(tmp_path)
    assert replay(tmp_path, until_step=5).steps == 5


@pytest.mark.slow
@pytest.mark.parametrize("inflight", [1, 2])
def test_recording_cut_off_anywhere_by_a_crash_replays(tmp_path, inflight):
    record(tmp_path, inflight=inflight)
    events = tmp_path / "run-1" / "events.msgpack"
    whole = events.read_bytes()
    outcomes = []
    for size in range(len(whole), 0, -97):
        events.write_bytes(whole[:size])
        outcomes.append(replay(tmp_path))

    assert {outcome.difference for outcome in outcomes} == {""}
    assert not outcomes[0].cut
    assert any(outcome.cut for outcome in outcomes)
    assert outcomes[len(outcomes) // 2].steps > 10


def test_difference_in_a_step_that_was_cut_off_is_shown(tmp_path):
    record(tmp_path)
    events = tmp_path / "run-1" / "events.msgpack"
    setup, written = read(tmp_path / "run-1")
    first = [*itertools.takewhile(lambda e: not isinstance(e, Completed), written)]
    events.unlink()
    again = Recorder(tmp_path, setup)
    for event in first:
        again.write(event)
    again.close()

    whole = replay(tmp_path / "run-2")
    assert (whole.difference, whole.cut, whole.steps) == ("", True, 3)

    other = replace_limits(setup, chunk_tokens=3)
    (tmp_path / "run-2" / "setup.json").write_bytes(msgspec.json.encode(other))
    assert replay(tmp_path / "run-2").difference.startswith("step 1: planned slot 0[0:3]")


def test_next_run_is_recorded_beside_the_first(tmp_path):
    record(tmp_path)
    before = (tmp_path / "run-1" / "events.msgpack").read_bytes()
    record(tmp_path, policy="fcfs")
    record(tmp_path)

    assert (tmp_path / "run-1" / "events.msgpack").read_bytes() == before
    assert [run.name for run in runs(tmp_path)] == ["run-1", "run-2", "run-3"]
    for run in runs(tmp_path):
        outcome = replay(run)
        assert (outcome.difference, outcome.requests) == ("", 30)
        assert outcome.started.endswith("+00:00")
    with pytest.raises(ConfigError, match=r"several runs.*run-1, run-2, run-3"):
        replay(tmp_path)


def test_tenth_run_comes_after_the_ninth(tmp_path):
    (tmp_path / "run-9").mkdir()
    record(tmp_path)

    assert [run.name for run in runs(tmp_path)] == ["run-10"]  # the ninth never started


def test_run_is_no_place_for_another_recording(tmp_path):
    record(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot record.*one run of a recording"):
        record(tmp_path / "run-1")
    with pytest.raises(ConfigError, match="holds no recording"):
        replay(tmp_path / "none")


def test_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot record to .*file"):
        record(tmp_path / "file")

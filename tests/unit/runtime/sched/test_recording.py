"""A recording replays decision for decision, and shows the first that differs."""

from __future__ import annotations

import random
from dataclasses import asdict, replace

import msgspec
import pytest

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.core.req import Req
from sylvan.runtime.sched.feature import Feature, Verdict
from sylvan.runtime.sched.limits import Limits
from sylvan.runtime.sched.policies import schedule_policy
from sylvan.runtime.sched.recorded import RecordedScheduler
from sylvan.runtime.sched.recording import Decided, Recorder, Setup, read
from sylvan.runtime.sched.replay import replay
from tests.support.kv import World, alone, request


class Moody(Feature):
    """Makes some requests wait; not a function of what a replay could know."""

    def __init__(self) -> None:
        self._random = random.Random(5)

    def gate(self, req: Req) -> Verdict:
        return self._random.choice([Verdict.READY, Verdict.READY, Verdict.WAIT])


def record(folder, *, policy="lpm", pages=16, features=(), inflight=2, weights=None) -> World:
    limits = Limits(
        max_batch_tokens=16, chunk_tokens=8, max_running_reqs=4, inflight=inflight, age_limit_s=0.3
    )
    world = World(pages=pages, page_size=4)
    setup = Setup(
        page_size=4,
        num_pages=pages + 1,
        prefix="radix",
        eviction="lru",
        policy=policy,
        seed=3,
        limits=asdict(limits),
        features=len(features),
        tenant_weights=weights or {},
    )
    recorder = Recorder(folder, setup)
    parts = replace(
        world.scheduler._parts,
        policy=schedule_policy(policy),
        features=features,
        seed=3,
        tenant_weights=weights or {},
    )
    world.scheduler = RecordedScheduler(parts, limits, recorder)
    rng = random.Random(1)
    todo = [
        request(str(i), [i % 3] * 6 + [i], new=rng.randrange(1, 9), tenant=str(i % 2))
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
    world.run()
    recorder.close()
    for req in todo:
        assert req.rid == "9" or world.tokens[req.rid] == alone(req)
    return world


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


def test_replay_repeats_what_features_said(tmp_path):
    record(tmp_path, features=(Moody(),))
    assert replay(tmp_path).difference == ""


def test_replay_shows_the_first_difference(tmp_path):
    record(tmp_path)
    setup = msgspec.json.decode((tmp_path / "setup.json").read_bytes(), type=Setup)
    other = msgspec.structs.replace(setup, limits=setup.limits | {"chunk_tokens": 3})
    (tmp_path / "setup.json").write_bytes(msgspec.json.encode(other))

    outcome = replay(tmp_path)
    assert outcome.difference.startswith("step 1: decided 0[0:3]")
    assert "recorded 0[0:7]" in outcome.difference


def test_replay_stops_where_told(tmp_path):
    record(tmp_path)
    assert replay(tmp_path, until_step=5).steps == 5


def test_recording_cut_off_by_a_crash_is_readable(tmp_path):
    record(tmp_path)
    whole = (tmp_path / "events.msgpack").read_bytes()
    (tmp_path / "events.msgpack").write_bytes(whole[: len(whole) * 2 // 3])

    _, events = read(tmp_path)
    assert sum(isinstance(e, Decided) for e in events) > 10


def test_folder_with_a_recording_is_refused(tmp_path):
    record(tmp_path)
    with pytest.raises(ConfigError, match="cannot record"):
        record(tmp_path)
    with pytest.raises(ConfigError, match="holds no recording"):
        replay(tmp_path / "none")

"""For all drafts, requests end with the same outputs as alone, and no page is lost."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from sylvan.runtime.features.speculation.control import Speculation
from sylvan.runtime.features.speculation.model_control import ModelSpeculation
from tests.support.drafters import KINDS, ScriptedDrafter, ScriptedModel
from tests.support.kv import VOCAB, World, alone, request
from tests.support.scheduler_inputs import setups
from tests.support.scheduler_machine import SchedulerMachine


class AnyDrafter(SchedulerMachine):
    """A scheduler that speculates."""

    @initialize(
        setup=setups(states=st.just(0)),
        kind=st.sampled_from(KINDS),
        limit=st.sampled_from([4, 1, 9]),
        adaptive=st.booleans(),
        samples=st.sampled_from([0, 8, 11]),
        seed=st.integers(0, 5),
    )
    def begin(self, setup, kind, limit, adaptive, samples, seed):
        self.drafter = ScriptedDrafter(kind, seed)
        times = itertools.accumulate(iter(random.Random(seed).random, None))
        speculation = Speculation(
            self.drafter, limit, VOCAB, adaptive=adaptive, clock=lambda: next(times)
        )
        setup = setup | {"max_samples": samples}
        self.start(setup, speculation, max_drafted=limit)

    def teardown(self):
        super().teardown()
        if getattr(self, "sound", False):
            assert not self.drafter.following, "what it knew of ended requests is kept"


class AnyModel(SchedulerMachine):
    """A scheduler for which another model writes ahead."""

    @initialize(
        setup=setups(states=st.just(0)),
        kind=st.sampled_from(KINDS),
        limit=st.sampled_from([4, 1, 9]),
        adaptive=st.booleans(),
        samples=st.sampled_from([0, 8, 11]),
        seed=st.integers(0, 5),
    )
    def begin(self, setup, kind, limit, adaptive, samples, seed):
        times = itertools.accumulate(iter(random.Random(seed).random, None))
        self.speculation = ModelSpeculation(
            ScriptedModel(kind, seed), limit, VOCAB, adaptive=adaptive, clock=lambda: next(times)
        )
        self.start(setup | {"max_samples": samples}, self.speculation, max_drafted=limit)

    def teardown(self):
        super().teardown()
        if getattr(self, "sound", False):
            assert not self.speculation._depth.followed
            assert not self.speculation._proposals


TestAnyModel = AnyModel.TestCase
TestAnyModel.settings = settings(
    max_examples=30, stateful_step_count=40, report_multiple_bugs=False
)
TestAnyDrafter = AnyDrafter.TestCase
TestAnyDrafter.settings = settings(
    max_examples=30, stateful_step_count=40, report_multiple_bugs=False
)


def world_with(kind, *, adaptive=False, limit=4, **setup):
    drafter = ScriptedDrafter(kind, 1)
    speculation = Speculation(drafter, limit, VOCAB, adaptive=adaptive)
    world = World(capabilities=(speculation,), **{"max_batch_tokens": 64} | setup)
    return world, speculation


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_without_and_all_memory_comes_back(kind):
    world, speculation = world_with(kind, pages=24)
    asked = [request(str(i), range(i, i + 5), new=30, seed=i) for i in range(6)]
    for one in asked:
        world.scheduler.add(one)
    world.run()

    for one in asked:
        assert world.tokens[one.rid] == alone(one)
    assert speculation.counts.looks > 50
    assert (speculation.counts.failures > 0) == (kind in ("nonsense", "raising", "moody"))
    assert (world.executor.drafted > 0) == (kind not in ("raising", "nonsense"))
    world.check_empty()


def test_counts_tell_what_was_verified_and_what_was_right():
    world, _ = world_with("right", limit=3)
    world.scheduler.add(request("a", [1, 2, 3], new=30))
    world.run()

    drafts = world.outputs["a"][-1].usage.drafts
    load = world.scheduler.load()
    assert drafts.accepted == drafts.proposed == world.executor.drafted > 10
    assert sum(drafts.histogram) == load.verified_drafts
    assert sum(n * count for n, count in enumerate(drafts.histogram)) == drafts.accepted
    assert load.accepted_draft_tokens == load.proposed_draft_tokens == drafts.accepted
    assert load.accept_rate == 1.0
    assert load.accept_length == pytest.approx(1 + drafts.accepted / load.verified_drafts)


def test_a_drafter_that_is_always_wrong_is_asked_ever_less():
    world, speculation = world_with("wrong", adaptive=True)
    world.scheduler.add(request("a", [1, 2, 3], new=250))
    world.run()

    assert world.tokens["a"] == alone(request("a", [1, 2, 3], new=250))
    assert 5 < speculation.counts.looks < 80
    assert speculation.counts.drafts < 30


def test_stops_inside_a_draft_end_the_request_there():
    whole = alone(request("a", [4, 5], new=40))
    stop = next(t for i, t in enumerate(whole) if i > 6 and t not in whole[:i])
    at = whole.index(stop)
    world, _ = world_with("right", limit=9, prefix=True, page_size=1)
    world.scheduler.add(request("a", [4, 5], new=40, eos_ids=(stop,)))
    world.run()

    assert world.tokens["a"] == whole[: at + 1]
    world.check_empty()
    world.scheduler.add(request("b", [4, 5, *whole[: at + 3]], new=1))
    world.run()
    assert world.outputs["b"][0].usage.cached_tokens <= 2 + at + 1, "draft tokens are not cached"


def test_drafts_retract_no_request():
    world, _ = world_with("wrong", limit=9, pages=14, page_size=1, conservativeness=1.0)
    for rid in "ab":
        world.scheduler.add(request(rid, [1, 2], new=4, seed=ord(rid)))
    world.run()

    assert world.scheduler.load().retractions == 0
    world.check_empty()

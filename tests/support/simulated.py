"""Profiles, workloads and recordings for tests of the simulator, in virtual time."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import asdict
from pathlib import Path

import numpy as np

from sylvan.protocol.arrays import EMPTY_IDS
from sylvan.protocol.requests import GenerateRequest
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.cache.build import kv_cache
from sylvan.runtime.cache.groups import KVGroup
from sylvan.runtime.features.flight_recorder.control import FlightRecorder
from sylvan.runtime.features.flight_recorder.recording import Recorder, SchedulerSetup
from sylvan.runtime.sched.limits import SchedulerDeps
from sylvan.runtime.sched.policies import schedule_policy
from sylvan.runtime.sched.scheduler import Scheduler
from sylvan.sim.clock import ReplicaClock
from sylvan.sim.cost import HostCost, NoisyStepTimes, RequestCost, StepCost
from sylvan.sim.executor import TimedExecutor
from sylvan.sim.features import SEGMENTS
from sylvan.sim.profile import Profile, SchedulerProfile
from sylvan.sim.workload import PromptBlock, SimulatedConversation, SimulatedTurn, Workload

STEP = StepCost(
    constant=0.004, rows=(5e-5,) * SEGMENTS, sample=2e-5, context=4e-8, pair=2e-9,
    decode_scatter=(0.9, 1.0, 1.3), prompt_scatter=(0.8, 1.0, 1.1, 1.2),
)  # fmt: skip
HOST = HostCost(constant=2e-4, slice=1e-5, start=5e-5, scatter=(0.7, 1.0, 2.0))


def engine(
    pages: int = 513, page_size: int = 8, schedule: str = "lpm", **limits
) -> SchedulerProfile:
    groups = (KVGroup(name="full", kind="full", num_pages=pages, page_size=page_size),)
    settings = {
        "max_batch_tokens": 256, "chunk_tokens": 64, "max_running_reqs": 16, **limits,
    }  # fmt: skip
    slots = settings["max_running_reqs"]
    return SchedulerProfile(kv_groups=groups, policy=schedule, settings=settings, num_slots=slots)


def profile(step: StepCost = STEP, host: HostCost = HOST, **kwargs) -> Profile:
    outside = RequestCost(constant=0.002)
    return Profile(engine=engine(**kwargs), step=step, host=host, request=outside)


def workload(
    count: int = 60, *, rate: float = 40.0, groups: int = 4, turns: int = 1, seed: int = 0,
    concurrency: int | None = None, warmup: int = 0,
) -> Workload:  # fmt: skip
    """Return conversations that share prefixes by group, at random times."""
    rng = random.Random(seed)
    due_s, made = 0.0, []
    for number in range(count):
        due_s += rng.expovariate(rate)
        shared = PromptBlock((seed, 1, rng.randrange(groups)), 48, shared=True)
        first = SimulatedTurn(
            [shared, PromptBlock((seed, 2, number), rng.randint(1, 40))], rng.randint(1, 40)
        )
        more = [
            SimulatedTurn(
                [PromptBlock((seed, 3, number, turn), rng.randint(1, 9))], rng.randint(1, 9)
            )
            for turn in range(1, turns)
        ]
        made.append(SimulatedConversation([first, *more], due_s))
    return Workload(made, concurrency, [made[0].turns[0]] * warmup)


def record(
    folder: Path, work: Workload, *, step: StepCost = STEP, host: HostCost = HOST, seed: int = 5
) -> None:
    """Record a scheduler whose steps take known times, driven by a loop like the server's."""
    made, clock = engine(), ReplicaClock()
    times = NoisyStepTimes(step, host, [seed])
    executor = TimedExecutor(made.caps, clock, times.step_s, lazily=True)
    setup = SchedulerSetup(
        kv_groups=made.kv_groups, prefix="radix", eviction="lru", policy=made.policy, seed=0,
        limits=asdict(made.limits), num_slots=made.num_slots,
    )  # fmt: skip
    flight = FlightRecorder(Recorder(folder, setup))
    parts = SchedulerDeps(
        cache=kv_cache(made.kv_groups, "radix", "lru"), executor=executor,
        policy=schedule_policy(made.policy), emit=lambda outputs: None, capabilities=(flight,),
        clock=flight.clock(clock),
    )  # fmt: skip
    scheduler = Scheduler(parts, made.limits)
    from sylvan.sim.workload import SimulatedPrompts

    prompts, left = SimulatedPrompts(), deque(work.conversations)
    number = 0
    while left or not scheduler.idle:
        if scheduler.idle:
            clock.reach(left[0].due_s)
        while left and left[0].due_s <= clock.now_s:
            number += 1
            scheduler.add(as_request(str(number), prompts, left.popleft().turns[0]))
        scheduler.step()
        clock.advance(times.host_s(executor.shape))
    flight.close()


def as_request(rid: str, prompts, turn: SimulatedTurn) -> GenerateRequest:
    return GenerateRequest(
        rid=rid,
        input_ids=np.asarray(prompts.ids(turn.parts), np.int32),
        output_ids=EMPTY_IDS,
        sampling=SamplingParams(
            max_new_tokens=turn.output_tokens, ignore_eos=True, sampling_seed=0
        ),
        interval=1,
    )

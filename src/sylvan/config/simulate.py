"""The configuration tree of simulations (`sylvan simulate`)."""

from __future__ import annotations

from typing import Annotated

import msgspec

from sylvan.config.bench import DataConfig, Positive
from sylvan.config.tree import Section
from sylvan.config.values import Count, Natural, Tokens

Replicas = Annotated[int, msgspec.Meta(ge=1, le=4096)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=100)]


class ArrivalConfig(Section, frozen=True):
    """When it is asked; as in a load test."""

    rate: Positive | None = None
    """Conversations that begin in a second; `none`: all at once, or as `load.concurrency` lets
    them."""
    burstiness: Positive = 1.0
    """Shape of the gaps with `load.rate`: 1 is a Poisson process, less comes in bursts, more is
    steadier."""
    concurrency: Count | None = None
    """Most requests at a time; `none`: no limit."""
    sweep: tuple[str, ...] = ()
    """Simulate each of these loads: `1,8,32` as `load.concurrency`, or `2/s,4/s` as `load.rate`."""
    timestamps: bool = False
    """`trace`: requests are sent at the times of the trace; `load.rate` does not count."""
    slowdown: Positive = 1.0
    """`load.timestamps`: gaps are so many times longer; 0.5 is twice the load."""
    warmup: Natural = 1
    """Requests before the measurement, one after the other: the first one, with at most 32 tokens
    of answer."""


class SimConfig(Section, frozen=True):
    """What serves it, and what it has to keep."""

    profile: str = ""
    """Profile of the model on its machine, which `sylvan simulate fit` wrote. Needed."""
    replicas: tuple[Replicas, ...] = (1,)
    """Numbers of replicas to try: `1,2,4`."""
    cache_tokens: tuple[Tokens, ...] = ()
    """Sizes of the KV cache of a replica to try, in tokens: `64k,128k`; default: that of the
    profile."""
    policies: tuple[Name, ...] = ("cache_aware",)
    """Routing policies of the gateway to try: `cache_aware,round_robin`."""
    gateway_ms: Annotated[float, msgspec.Meta(ge=0, le=60_000)] = 0.0
    """Milliseconds that a gateway adds to the way of a request and its answer."""
    schedules: tuple[Name, ...] = ()
    """Policies of the scheduler's queue to try: `lpm,fcfs`; default: that of the profile."""
    slo: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """Bounds in milliseconds that a good request keeps: `ttft=500,tpot=50,e2e=10000`."""
    share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.99
    """Share of the requests that has to keep `sim.slo`."""
    seed: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)] = 0
    """Seed of the scatter of times, and of policies that draw; what is asked has `data.seed`."""
    scatter: bool = True
    """Let the times of steps scatter as they were measured to; else each takes its mean."""
    against: str | None = None
    """File of `sylvan bench serve --output FILE --output-details`: simulate its last run, with its
    data and load, and print how far the simulation is from it."""
    tokenizer: str | None = None
    """Directory of the model's tokenizer: prompts are those of `sylvan bench serve`; without, they
    are as long and share as much, and are made a hundred times faster. `sharegpt` and `custom` need
    it."""
    jobs: Annotated[int, msgspec.Meta(ge=1, le=256)] = 1
    """Scenarios that are simulated at the same time, each in a process."""


class SimResultConfig(Section, frozen=True):
    """What becomes of the simulation."""

    file: str | None = None
    """JSONL file to which a line is added for each scenario."""
    html: str | None = None
    """File for a report with charts."""
    tag: str | None = None
    """Name of the simulation in the file and report."""


class SimulateConfig(Section, frozen=True):
    """One simulation."""

    sim: SimConfig = SimConfig()
    data: DataConfig = DataConfig()
    load: ArrivalConfig = ArrivalConfig()
    result: SimResultConfig = SimResultConfig()

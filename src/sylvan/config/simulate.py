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
    """The load: when requests are sent; as in a load test."""

    rate: Positive | None = None
    """Conversations started per second; `none`: all at once, or as `load.concurrency` allows."""
    burstiness: Positive = 1.0
    """Shape of the gaps with `load.rate`: 1 is a Poisson process, smaller values are burstier,
    larger ones more regular."""
    concurrency: Count | None = None
    """Most requests at a time; `none`: no limit."""
    sweep: tuple[str, ...] = ()
    """Loads to simulate: `1,8,32` as `load.concurrency`, or `2/s,4/s` as `load.rate`."""
    timestamps: bool = False
    """`trace`: send requests at the times of the trace; `load.rate` is ignored."""
    slowdown: Positive = 1.0
    """`load.timestamps`: factor by which gaps are stretched; 0.5 doubles the load."""
    warmup: Natural = 1
    """Requests sent one after the other before the measurement: copies of the first one, with at
    most 32 output tokens."""


class SimConfig(Section, frozen=True):
    """The servers to simulate, and their latency targets."""

    profile: str = ""
    """Profile of the model on its machine, written by `sylvan simulate fit`. Required."""
    replicas: tuple[Replicas, ...] = (1,)
    """Numbers of replicas to try: `1,2,4`."""
    cache_tokens: tuple[Tokens, ...] = ()
    """KV cache sizes of a replica to try, in tokens: `64k,128k`; default: the profile's."""
    policies: tuple[Name, ...] = ("cache_aware",)
    """Routing policies of the gateway to try: `cache_aware,round_robin`."""
    gateway_ms: Annotated[float, msgspec.Meta(ge=0, le=60_000)] = 0.0
    """Milliseconds that a gateway adds to each request."""
    schedules: tuple[Name, ...] = ()
    """Scheduling policies to try: `lpm,fcfs`; default: the profile's."""
    slo: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """Latency targets in milliseconds, for goodput: `ttft=500,tpot=50,e2e=10000`."""
    share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.99
    """Share of the requests that must meet `sim.slo`."""
    seed: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)] = 0
    """Seed of random step times and policies; `data.seed` is the seed of the load."""
    scatter: bool = True
    """Vary step times as measured; otherwise each step takes its mean time."""
    against: str | None = None
    """File written by `sylvan bench serve --output FILE --output-details`: simulate its last run,
    with its data and load, and print the error of the simulation."""
    tokenizer: str | None = None
    """Directory of the model's tokenizer, to simulate the exact prompts of `sylvan bench serve`.
    Without it, prompts have the same lengths and shared prefixes, and are generated a hundred times
    faster. `sharegpt` and `custom` need it."""
    jobs: Annotated[int, msgspec.Meta(ge=1, le=256)] = 1
    """Number of scenarios to simulate in parallel, each in its own process."""


class SimResultConfig(Section, frozen=True):
    """The results of the simulation."""

    file: str | None = None
    """JSONL file to which each scenario appends a line."""
    html: str | None = None
    """File for an HTML report with charts."""
    tag: str | None = None
    """Name of the simulation in the file and report."""


class SimulateConfig(Section, frozen=True):
    """One simulation."""

    sim: SimConfig = SimConfig()
    data: DataConfig = DataConfig()
    load: ArrivalConfig = ArrivalConfig()
    result: SimResultConfig = SimResultConfig()

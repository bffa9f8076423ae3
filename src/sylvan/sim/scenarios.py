"""The scenarios of a simulation: each load with each number of replicas, cache size and policy."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from sylvan.config.objectives import Bounds
from sylvan.config.route import RoutingConfig
from sylvan.config.simulate import ArrivalConfig, SimConfig
from sylvan.config.sweep import loads
from sylvan.gateway import policies as routing_policies
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.sched.policies import schedule_policy
from sylvan.sim.datasets import Draft, arranged
from sylvan.sim.figures import figures, shares, times_ms
from sylvan.sim.fleet import Fleet, Progress
from sylvan.sim.profile import Profile
from sylvan.utils.plugins import load as load_plugin

MAX_SCENARIOS = 1000


@dataclass(frozen=True, slots=True)
class Scenario:
    """One scenario.

    Attributes:
        load: Arrival of requests.
        replicas: Number of servers.
        cache_tokens: Cache size of each.
        policy: Routing policy.
        schedule: Scheduling policy of each server.
    """

    load: ArrivalConfig
    replicas: int
    cache_tokens: int
    policy: str
    schedule: str

    @property
    def load_name(self) -> str:
        """Return the load in words."""
        load = self.load
        if load.timestamps:
            return "the trace" if load.slowdown == 1 else f"the trace, gaps x {load.slowdown:g}"
        words = [f"{load.rate:g}/s"] if load.rate is not None else []
        words += [f"{load.concurrency} at a time"] if load.concurrency is not None else []
        return ", ".join(words) or "all at once"


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a scenario.

    Attributes:
        figures: See `figures`; plus the scenario's parameters.
        shares: For each duration, points (ms, share of requests that took at most that long).
        errors: Number of failures by reason.
    """

    figures: dict[str, Any]
    shares: dict[str, list[tuple[float, float]]]
    errors: dict[str, int] = {}


@dataclass(frozen=True, slots=True)
class Study:
    """Shared by all scenarios.

    Attributes:
        profile: Profile of the server.
        turns: The workload.
        slo: Limits to be met.
        arrivals: Seed of arrival times.
        seed: Seed of everything else.
        scatter: See `Fleet`.
        gateway_s: Latency that a gateway adds to a request.
    """

    profile: Profile
    turns: Draft
    slo: Bounds
    arrivals: int
    seed: int
    scatter: bool
    gateway_s: float = 0.0

    def run(self, scenario: Scenario, progress: Progress = lambda done, total: None) -> Result:
        """Simulate one scenario.

        Raises:
            ConfigError: The cache is too small for any request.
        """
        engine = self.profile.engine.with_cache(scenario.cache_tokens)
        engine = msgspec.structs.replace(engine, policy=scenario.schedule)
        request = self.profile.request
        request = msgspec.structs.replace(request, constant=request.constant + self.gateway_s)
        profile = msgspec.structs.replace(self.profile, engine=engine, request=request)
        workload = replace(arranged(self.turns, scenario.load, self.arrivals), slo=self.slo)
        fleet = Fleet(
            profile,
            RoutingConfig(policy=scenario.policy),
            scenario.replicas,
            seed=self.seed,
            scatter=self.scatter,
        )
        outcomes = fleet.run(workload, progress)
        errors: dict[str, int] = {}
        for error in outcomes.errors.values():
            errors[error] = errors.get(error, 0) + 1
        found = {
            "load": scenario.load_name,
            "request_rate": scenario.load.rate,
            "max_concurrency": scenario.load.concurrency,
            "replicas": scenario.replicas,
            "cache_tokens": engine.cache_tokens,
            "policy": scenario.policy,
            "schedule": scenario.schedule,
            **figures(fleet, self.slo),
        }
        return Result(
            figures=found,
            shares={name: shares(values) for name, values in times_ms(outcomes).items()},
            errors=errors,
        )


def scenarios(config: SimConfig, load: ArrivalConfig, profile: Profile) -> list[Scenario]:
    """Return all scenarios: by load, then by number of replicas, then the rest.

    Raises:
        ConfigError: A policy or load does not exist, or there are too many.
    """
    policies = [name.replace("-", "_") for name in config.policies]
    for policy in policies:
        _known("sim.policies", lambda name=policy: load_plugin(routing_policies, name))
    for schedule in config.schedules:
        _known("sim.schedules", lambda name=schedule: schedule_policy(name))
    grid = itertools.product(
        loads(load),
        config.replicas,
        config.cache_tokens or (profile.engine.cache_tokens,),
        policies,
        config.schedules or (profile.engine.policy,),
    )
    found = [Scenario(*each) for each in grid]
    if len(found) > MAX_SCENARIOS:
        raise ConfigError(
            f"sim.replicas, sim.cache_tokens, sim.policies, sim.schedules and load.sweep make "
            f"{len(found)} scenarios; the limit is {MAX_SCENARIOS}"
        )
    return found


def _known(setting: str, find: Callable[[], object]) -> None:
    try:
        find()
    except ConfigError as error:
        raise ConfigError(f"{setting}: {error}") from error


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """Requirements of a load.

    Attributes:
        load: The load in words.
        best: The smallest that meets the limits; else the one that meets them for most requests.
        meets_slo: Whether it meets them.
    """

    load: str
    best: Result
    meets_slo: bool


def capacity_plans(results: Sequence[Result], share: float) -> list[CapacityPlan]:
    """Return for each load: fewest replicas, then smallest cache, then most good requests."""
    found: list[CapacityPlan] = []
    for load in dict.fromkeys(result.figures["load"] for result in results):
        those = [result for result in results if result.figures["load"] == load]
        keeping = [result for result in those if result.figures["goodput_share"] >= share]
        best = min(keeping or those, key=_size if keeping else _failing)
        found.append(CapacityPlan(load, best, bool(keeping)))
    return found


def _size(result: Result) -> tuple[float, ...]:
    figures = result.figures
    return (figures["replicas"], figures["cache_tokens"], -figures["goodput_share"])


def _failing(result: Result) -> tuple[float, ...]:
    figures = result.figures
    return (-figures["goodput_share"], figures["replicas"], figures["cache_tokens"])


Report = Callable[[Result], None]
"""Called with each result, in the order of the scenarios."""

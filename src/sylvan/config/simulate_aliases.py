"""Other names for the settings of a simulation: short ones, and those of load tests."""

from __future__ import annotations

from collections.abc import Mapping

from sylvan.config.aliases import Alias, Pairs, plain_text
from sylvan.config.bench_aliases import bench_aliases

_RENAMED = {
    "model_profile": "sim.profile",
    "profile": "sim.profile",
    "replicas": "sim.replicas",
    "cache_tokens": "sim.cache_tokens",
    "policy": "sim.policies",
    "gateway_ms": "sim.gateway_ms",
    "schedule_policy": "sim.schedules",
    "slo": "sim.slo",
    "share": "sim.share",
    "against": "sim.against",
    "tokenizer": "sim.tokenizer",
    "jobs": "sim.jobs",
}
_SHARED = ("data.", "load.rate", "load.burst", "load.conc", "load.sweep", "load.slow", "load.time")
_RESULTS = ("result.file", "result.html", "result.tag")


def simulate_aliases() -> Mapping[str, Alias]:
    """All aliases by Python name."""
    shared = {
        name: alias
        for name, alias in bench_aliases().items()
        if alias.target.startswith(_SHARED) or alias.target in _RESULTS
    }
    own = {name: _renamed(path) for name, path in _RENAMED.items()}
    return {**shared, **own, "trace": Alias("data.path", _trace)}


def _renamed(target: str) -> Alias:
    return Alias(target, lambda value: ((target, value),))


def _trace(value: object) -> Pairs:
    """A trace is sent at its own times."""
    yield "data.dataset", "trace"
    yield "data.path", plain_text(value)
    yield "load.timestamps", True

"""The results of a scenario, under the names of load test results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sylvan.config.objectives import Bounds
from sylvan.sim.fleet import Fleet
from sylvan.sim.outcomes import Column, Outcomes

PERCENTILES = (90, 95, 99)
MAX_POINTS = 200


def figures(fleet: Fleet, slo: Bounds) -> dict[str, Any]:
    """Return all figures of a scenario; times are 0 if nothing was measured."""
    outcomes, done = fleet.outcomes, fleet.outcomes.done
    end_s = np.asarray(outcomes.end_s)
    duration_s = max(float(end_s.max(initial=0.0)), 1e-9)
    inputs, outputs = _sum(outcomes.prompt, done), _sum(outcomes.output, done)
    cached = _sum(outcomes.cached, done)
    executors = [replica.executor for replica in fleet.replicas]
    served = np.bincount(outcomes.replica, minlength=len(executors))
    found: dict[str, Any] = {
        "duration": duration_s,
        "completed": int(done.sum()),
        "failed": len(outcomes) - int(done.sum()),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "total_cached_tokens": cached,
        "hit_rate": cached / max(1, inputs),
        "request_throughput": float(done.sum()) / duration_s,
        "input_throughput": inputs / duration_s,
        "output_throughput": outputs / duration_s,
        "total_throughput": (inputs + outputs) / duration_s,
        "concurrency": float(outcomes.latency_s[done].sum()) / duration_s,
        "max_concurrent_requests": fleet.max_concurrent,
        "retractions": sum(outcomes.retractions),
        "steps": sum(each.steps for each in executors),
        "computed_tokens": sum(each.rows for each in executors),
        "max_rows": max(each.max_rows for each in executors),
        "busy": float(np.mean([each.busy_s for each in executors])) / duration_s,
        "imbalance": float(served.max() / max(served.mean(), 1e-9)),
    }
    for name, values in times_ms(outcomes).items():
        found |= _distribution(name, values)
    if slo:
        good = done & meets_slo(outcomes, slo)
        found["goodput"] = float(good.sum()) / duration_s
        found["goodput_share"] = float(good.sum()) / max(1, len(outcomes))
    return found


def times_ms(outcomes: Outcomes) -> dict[str, Column]:
    """Return each duration for the successful requests, in milliseconds."""
    done = outcomes.done
    several = done & (np.asarray(outcomes.output) > 1)
    return {
        "e2e_latency": 1000 * outcomes.latency_s[done],
        "ttft": 1000 * outcomes.ttft_s[done],
        "tpot": 1000 * outcomes.tpot_s[several],
    }


def meets_slo(outcomes: Outcomes, slo: Bounds) -> NDArray[np.bool_]:
    """Return which requests met all SLO limits."""
    times = {"ttft": outcomes.ttft_s, "tpot": outcomes.tpot_s, "e2e": outcomes.latency_s}
    found = np.ones(len(outcomes), np.bool_)
    for name, bound_s in slo.items():
        found &= times[name] <= bound_s
    return found


def shares(values: Column) -> list[tuple[float, float]]:
    """Return points (time, share of requests that took at most that long)."""
    if not len(values):
        return []
    at = np.linspace(0, 100, min(MAX_POINTS, 2 * len(values)))
    found = np.percentile(values, at)
    return [(float(x), float(y) / 100) for x, y in zip(found, at, strict=True)]


def _sum(column: Sequence[int], where: NDArray[np.bool_]) -> int:
    return int(np.asarray(column, np.int64)[where].sum())


def _distribution(name: str, values: Column) -> dict[str, float]:
    values = values if len(values) else np.zeros(1)
    found = {
        f"mean_{name}_ms": float(values.mean()),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(values.std()),
        f"max_{name}_ms": float(values.max()),
    }
    for percent in PERCENTILES:
        found[f"p{percent}_{name}_ms"] = float(np.percentile(values, percent))
    return found

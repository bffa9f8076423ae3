"""The figures of a run: rates, and the distribution of each duration.

Keys are named as in SGLang's `bench_serving`, so that tools for its files can read ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from sylvan.bench.load import Measured
from sylvan.bench.outcome import RequestRecord
from sylvan.config.objectives import Bounds, Latency

TIMES = ("e2e_latency", "ttft", "tpot", "itl")
PERCENTILES = (90, 95, 99)
_BOUNDED: Mapping[Latency, Callable[[RequestRecord], float]] = {
    "ttft": lambda each: each.ttft_s,
    "tpot": lambda each: each.tpot_s,
    "e2e": lambda each: each.latency_s,
}


def times_ms(
    outcomes: Sequence[RequestRecord],
) -> Mapping[str, np.ndarray[Any, np.dtype[np.float64]]]:
    """Return each of `TIMES` for the successful requests, in milliseconds.

    `tpot` omits requests of a single token, which have none.
    """
    done = [each for each in outcomes if not each.error]
    values = {
        "e2e_latency": [each.latency_s for each in done],
        "ttft": [each.ttft_s for each in done],
        "tpot": [each.tpot_s for each in done if each.output_tokens > 1],
        "itl": [gap for each in done for gap in each.gaps_s],
    }
    return {name: 1000 * np.asarray(found, np.float64) for name, found in values.items()}


def summary(measured: Measured, goodput: Bounds) -> dict[str, Any]:
    """Return all figures of a run; times are 0 if nothing was measured."""
    outcomes, duration_s = measured.outcomes, max(measured.duration_s, 1e-9)
    done = [each for each in outcomes if not each.error]
    inputs = sum(each.prompt_tokens for each in done)
    outputs = sum(each.output_tokens for each in done)
    lengths = [each.accept_length for each in done if each.accept_length is not None]
    found: dict[str, Any] = {
        "duration": measured.duration_s,
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "total_cached_tokens": sum(each.cached_tokens for each in done),
        "request_throughput": len(done) / duration_s,
        "input_throughput": inputs / duration_s,
        "output_throughput": outputs / duration_s,
        "total_throughput": (inputs + outputs) / duration_s,
        "concurrency": sum(each.latency_s for each in done) / duration_s,
        "max_concurrent_requests": measured.max_concurrent,
        "max_output_tokens_per_s": _peak(done),
        "steady_output_throughput": _steady(done),
        "accept_length": float(np.mean(lengths)) if lengths else None,
        "send_delay_p99_ms": _send_delay(outcomes),
    }
    for name, values in times_ms(outcomes).items():
        found |= _distribution(name, values)
    if goodput:
        good = [each for each in done if all(_BOUNDED[k](each) <= v for k, v in goodput.items())]
        found["goodput"] = len(good) / duration_s
        found["goodput_share"] = len(good) / max(1, len(outcomes))
    return found


def _distribution(name: str, values: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, float]:
    if not len(values):
        values = np.zeros(1)
    found = {
        f"mean_{name}_ms": float(values.mean()),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(values.std()),
        f"max_{name}_ms": float(values.max()),
    }
    for percent in PERCENTILES:
        found[f"p{percent}_{name}_ms"] = float(np.percentile(values, percent))
    return found


def _peak(done: Sequence[RequestRecord]) -> float:
    """Return the largest number of output tokens in one second of the run."""
    moments = [moment for each in done for moment in token_moments(each)]
    if not moments:
        return 0.0
    return float(np.bincount(np.asarray(moments, np.int64)).max())


def _steady(done: Sequence[RequestRecord]) -> float | None:
    """Return output tokens per second while the load was steady.

    From the end of the first answer until the last request was sent. None: there is no such period.
    """
    began_s = min((each.sent_s + each.latency_s for each in done), default=0.0)
    ended_s = max((each.sent_s for each in done), default=0.0)
    if ended_s <= began_s:
        return None
    tokens = 0.0
    for each in done:
        moments = token_moments(each)
        inside = sum(began_s <= moment < ended_s for moment in moments)
        tokens += each.output_tokens * inside / len(moments)  # a chunk may contain several
    return tokens / (ended_s - began_s)


def token_moments(outcome: RequestRecord) -> list[float]:
    """Return when each output token arrived, in seconds from the start of the run."""
    now_s = outcome.sent_s + outcome.ttft_s
    found = [now_s]
    for gap_s in outcome.gaps_s:
        now_s += gap_s
        found.append(now_s)
    return found


def _send_delay(outcomes: Sequence[RequestRecord]) -> float:
    """Return how late requests were sent, because of the concurrency limit or a slow client."""
    late = [max(0.0, each.sent_s - each.due_s) * 1000 for each in outcomes]
    return float(np.percentile(late, 99)) if late else 0.0

"""Compares two results: is B faster than A, with which confidence?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sylvan.bench.results import Result
from sylvan.protocol.errors import ConfigError

RESAMPLES = 2000
LEVEL = 95
_SEED = 0
_RATES = ("request_throughput", "output_throughput", "total_throughput")
MIN_SAMPLES = 2

Sample = NDArray[np.float64]
Statistic = Callable[[Sample], float]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure of both results.

    Attributes:
        name: Name of the figure.
        a: Its value in A.
        b: Its value in B.
        low, high: 95 % confidence interval of B / A; None for a single run.
    """

    name: str
    a: float
    b: float
    low: float | None
    high: float | None

    @property
    def ratio(self) -> float:
        """B / A."""
        return self.b / self.a if self.a else float("nan")

    @property
    def differs(self) -> bool:
        """Whether the interval excludes 1."""
        return self.low is not None and self.high is not None and not self.low <= 1 <= self.high


def compare(a: Sequence[Result], b: Sequence[Result]) -> list[Comparison]:
    """Compare all common figures.

    Times are resampled over requests, of all runs together; rates over runs, if there are several.

    Raises:
        ConfigError: A run was stored without details of its requests.
    """
    rng = np.random.default_rng(_SEED)
    times_a, times_b = _times(a), _times(b)
    found: list[Comparison] = []
    for name in _RATES:
        rates_a, rates_b = (np.asarray([run[name] for run in runs], float) for runs in (a, b))
        found.append(_compared(name, rates_a, rates_b, _median, rng))
    statistics: Mapping[str, Statistic] = {"median": _median, "p99": _p99}
    for name, sample in times_a.items():
        other = times_b[name]
        if len(sample) and len(other):
            for word, statistic in statistics.items():
                found.append(_compared(f"{word}_{name}_ms", sample, other, statistic, rng))
    return found


def _compared(
    name: str,
    a: Sample,
    b: Sample,
    statistic: Statistic,
    rng: np.random.Generator,
) -> Comparison:
    low = high = None
    if min(len(a), len(b)) >= MIN_SAMPLES:
        ratios = np.empty(RESAMPLES)
        for number in range(RESAMPLES):
            first = statistic(rng.choice(a, len(a)))
            second = statistic(rng.choice(b, len(b)))
            ratios[number] = second / first if first else np.nan
        tail = (100 - LEVEL) / 2
        low, high = (float(v) for v in np.nanpercentile(ratios, (tail, 100 - tail)))
    return Comparison(name, float(statistic(a)), float(statistic(b)), low, high)


def _times(runs: Sequence[Result]) -> Mapping[str, Sample]:
    """Return durations of the successful requests, in milliseconds."""
    if any("ttfts" not in run for run in runs):
        raise ConfigError("results need details of requests: run with --result.details true")
    e2e: list[float] = []
    ttft: list[float] = []
    tpot: list[float] = []
    for run in runs:
        rows = zip(run["latencies"], run["ttfts"], run["output_lens"], run["errors"], strict=True)
        for latency_s, ttft_s, tokens, error in rows:
            if error:
                continue
            e2e.append(latency_s)
            ttft.append(ttft_s)
            if tokens > 1:
                tpot.append((latency_s - ttft_s) / (tokens - 1))
    named = {"e2e_latency": e2e, "ttft": ttft, "tpot": tpot}
    return {name: 1000 * np.asarray(values, np.float64) for name, values in named.items()}


def _median(values: Sample) -> float:
    return float(np.median(values))


def _p99(values: Sample) -> float:
    return float(np.percentile(values, 99))

"""Results as one HTML page with charts, without scripts and external resources."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray

from sylvan.bench.load import Measured
from sylvan.bench.metrics import times_ms, token_moments
from sylvan.bench.results import Result
from sylvan.utils.charts import STYLE, Points, chart

MAX_POINTS = 200
_COLUMNS = (
    ("completed", "done", "d"),
    ("failed", "failed", "d"),
    ("request_throughput", "requests/s", ".2f"),
    ("output_throughput", "output tokens/s", ".1f"),
    ("median_ttft_ms", "TTFT p50 (ms)", ".1f"),
    ("p99_ttft_ms", "TTFT p99", ".1f"),
    ("median_tpot_ms", "TPOT p50 (ms)", ".2f"),
    ("p99_itl_ms", "ITL p99 (ms)", ".2f"),
    ("median_e2e_latency_ms", "E2E p50 (ms)", ".0f"),
    ("p99_e2e_latency_ms", "E2E p99", ".0f"),
)
_SHARES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token",
    "e2e_latency": "End to end",
}


@dataclass(frozen=True, slots=True)
class PageRun:
    """One run on the page.

    Attributes:
        name: Its load, and its tag.
        result: Its figures.
        shares: For some durations, points (ms, share of requests that took at most that long).
        rates: Points (second of the run, output tokens in it).
    """

    name: str
    result: Result
    shares: dict[str, Points]
    rates: Points

    @classmethod
    def of(cls, result: Result, measured: Measured) -> PageRun:
        """Build it from measurements."""
        times = times_ms(measured.outcomes)
        shares = {name: _shares(times[name]) for name in _SHARES}
        return cls(_name(result), result, shares, _rates(measured))


def page(runs: Sequence[PageRun]) -> str:
    """Return the whole page."""
    first = runs[0].result
    charts = [
        chart(title, "ms", "share", [(run.name, run.shares[name]) for run in runs])
        for name, title in _SHARES.items()
        if any(run.shares[name] for run in runs)
    ]
    if any(run.rates for run in runs):
        lines = [(run.name, run.rates) for run in runs]
        charts.append(chart("Output tokens a second", "s", "tokens", lines))
    if len(runs) > 1:
        curve = sorted(
            (run.result["output_throughput"], run.result["median_e2e_latency_ms"]) for run in runs
        )
        charts.append(
            chart("Latency over throughput", "output tokens/s", "E2E p50 (ms)", [("", curve)])
        )
    about = {"model": first["model"], **first["origin"], "config": first["config"]}
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>Load test of {escape(str(first['model']))}</title><style>{STYLE}</style></head>"
        f"<body><h1>Load test of {escape(str(first['model']))}</h1>{_table(runs)}"
        f'<div class="charts">{"".join(charts)}</div>'
        f"<h2>Settings and machine</h2><pre>{escape(json.dumps(about, indent=2))}</pre>"
        "</body></html>\n"
    )


def _name(result: Result) -> str:
    rate, limit = result["request_rate"], result["max_concurrency"]
    load = [f"{rate:g}/s"] if rate is not None else []
    load += [f"{limit} at a time"] if limit is not None else []
    return ", ".join([*([result["tag"]] if result["tag"] else []), *(load or ["all at once"])])


def _shares(values: NDArray[np.float64]) -> Points:
    if not len(values):
        return ()
    at = np.linspace(0, 100, min(MAX_POINTS, 2 * len(values)))
    return [(float(x), float(y) / 100) for x, y in zip(np.percentile(values, at), at, strict=True)]


def _rates(measured: Measured) -> Points:
    moments = [m for each in measured.outcomes if each.output_tokens for m in token_moments(each)]
    if not moments:
        return ()
    width_s = max(1.0, measured.duration_s / MAX_POINTS)
    counts = np.bincount((np.asarray(moments) / width_s).astype(int))
    return [(i * width_s, float(count) / width_s) for i, count in enumerate(counts)]


def _table(runs: Sequence[PageRun]) -> str:
    head = "".join(f"<th>{escape(title)}</th>" for _, title, _ in _COLUMNS)
    rows = "".join(
        f"<tr><td>{escape(run.name)}</td>"
        + "".join(f"<td>{format(run.result[key], spec)}</td>" for key, _, spec in _COLUMNS)
        + "</tr>"
        for run in runs
    )
    return (
        f'<div class="scroll"><table><thead><tr><th>load</th>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )

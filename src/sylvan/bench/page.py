"""Results as one HTML page with charts: no scripts, no outside resources."""

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

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 460, 240, 56, 36, 28, 12
MAX_POINTS = 200
_COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
_STYLE = """
:root { color-scheme: light dark; --ink: #1f2937; --dim: #6b7280; --line: #d1d5db; --back: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e5e7eb; --dim: #9ca3af; --line: #374151; --back: #111827; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back);
  max-width: 1000px; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; }
th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
.charts { display: flex; flex-wrap: wrap; gap: 1rem; margin: 1rem 0; }
svg { max-width: 100%; height: auto; }
svg text { fill: var(--dim); font-size: 11px; }
svg .title { fill: var(--ink); font-size: 13px; font-weight: 600; }
svg .grid { stroke: var(--line); stroke-width: 1; }
pre { overflow-x: auto; padding: 1rem; border: 1px solid var(--line); }
"""
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

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Run:
    """One run as the page shows it.

    Attributes:
        name: Its load, and its tag.
        result: Its figures.
        shares: For each of some times, points (ms, share of requests that took no longer).
        rates: Points (second of the run, output tokens in it).
    """

    name: str
    result: Result
    shares: dict[str, Points]
    rates: Points

    @classmethod
    def of(cls, result: Result, measured: Measured) -> Run:
        """From what was measured."""
        times = times_ms(measured.outcomes)
        shares = {name: _shares(times[name]) for name in _SHARES}
        return cls(_name(result), result, shares, _rates(measured))


def page(runs: Sequence[Run]) -> str:
    """The whole page."""
    first = runs[0].result
    charts = [
        _chart(title, "ms", "share", [(run.name, run.shares[name]) for run in runs])
        for name, title in _SHARES.items()
        if any(run.shares[name] for run in runs)
    ]
    if any(run.rates for run in runs):
        lines = [(run.name, run.rates) for run in runs]
        charts.append(_chart("Output tokens a second", "s", "tokens", lines))
    if len(runs) > 1:
        curve = sorted(
            (run.result["output_throughput"], run.result["median_e2e_latency_ms"]) for run in runs
        )
        charts.append(
            _chart("Latency over throughput", "output tokens/s", "E2E p50 (ms)", [("", curve)])
        )
    about = {"model": first["model"], **first["origin"], "config": first["config"]}
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>Load test of {escape(str(first['model']))}</title><style>{_STYLE}</style></head>"
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


def _table(runs: Sequence[Run]) -> str:
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


def _chart(title: str, x_unit: str, y_unit: str, lines: Sequence[tuple[str, Points]]) -> str:
    """Lines over axes that begin at 0."""
    points = [point for _, line in lines for point in line]
    top_x = max(x for x, _ in points) or 1.0
    top_y = max(y for _, y in points) or 1.0
    inner_w, inner_h = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(point: tuple[float, float]) -> str:
        x, y = LEFT + inner_w * point[0] / top_x, TOP + inner_h * (1 - point[1] / top_y)
        return f"{x:.1f},{y:.1f}"

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" '
        f'aria-label="{escape(title)}"><text class="title" x="{LEFT}" y="16">{escape(title)}</text>'
    ]
    for step in range(5):
        share = step / 4
        y, x = TOP + inner_h * (1 - share), LEFT + inner_w * share
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(
            f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{_short(top_y * share)}</text>'
        )
        anchor = "end" if step == 4 else "middle"
        label = _short(top_x * share) + (f" {x_unit}" if step == 4 else "")
        parts.append(
            f'<text x="{x}" y="{HEIGHT - 16}" text-anchor="{anchor}">{escape(label)}</text>'
        )
    for number, (name, line) in enumerate(lines):
        colour = _COLOURS[number % len(_COLOURS)]
        path = " ".join(place(point) for point in line)
        parts.append(
            f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{path}">'
            f"<title>{escape(name)}</title></polyline>"
        )
        if name and len(lines) > 1:
            y = TOP + 14 + 14 * number
            parts.append(
                f'<text x="{LEFT + 8}" y="{y}" style="fill:{colour}">{escape(name)}</text>'
            )
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 2}">{escape(y_unit)}</text></svg>')
    return "".join(parts)


def _short(value: float) -> str:
    if value >= 10_000:
        return f"{value / 1000:.0f}k"
    return f"{value:.0f}" if value >= 10 or value == 0 else f"{value:.2g}"

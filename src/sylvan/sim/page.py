"""Simulation results as one HTML page with charts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import msgspec

from sylvan.sim.profile import Profile
from sylvan.sim.scenarios import Result
from sylvan.sim.table import COLUMNS
from sylvan.utils.charts import STYLE, chart

AXES = ("replicas", "request_rate", "max_concurrency", "cache_tokens")
"""Possible x axes, in order of preference; lines differ in the others."""
_NAMES = {
    "replicas": "{} replicas",
    "request_rate": "{:g}/s",
    "max_concurrency": "{} at a time",
    "cache_tokens": "{} tokens",
    "policy": "{}",
    "schedule": "{}",
}
_CURVES = (
    ("goodput_share", "Requests that meet the targets", "share"),
    ("request_throughput", "Requests a second", "1/s"),
    ("median_ttft_ms", "Time to first token, p50", "ms"),
    ("p99_ttft_ms", "Time to first token, p99", "ms"),
    ("p99_tpot_ms", "Time per output token, p99", "ms"),
    ("hit_rate", "Prompt tokens from the cache", "share"),
)
_SHARES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token",
    "e2e_latency": "End to end",
}
MAX_LINES = 8  # of a chart


def page(
    title: str, results: Sequence[Result], sentences: Sequence[str], about: Mapping[str, Any]
) -> str:
    """Return the whole page.

    Args:
        title: Heading.
        results: Results of all scenarios.
        sentences: Conclusions.
        about: Settings, profile and errors, for the end of the page.
    """
    found = [*_curves(results), *_distributions(results)]
    paragraphs = "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>"
        f"<body><h1>{escape(title)}</h1>{paragraphs}{_table(results)}"
        f'<div class="charts">{"".join(found)}</div>'
        f"<h2>Settings and profile</h2><pre>{escape(json.dumps(about, indent=2))}</pre>"
        "</body></html>\n"
    )


def about(profile: Profile, config: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the page shows at its end, without the long quantiles of a profile."""
    shown = msgspec.to_builtins(profile)
    for part in ("step", "host"):
        shown[part] = {k: v for k, v in shown[part].items() if not k.endswith("scatter")}
    return {"config": config, **more, "profile": shown}


def _curves(results: Sequence[Result]) -> list[str]:
    """Draw over the first axis that varies."""
    varying = [axis for axis in (*AXES, "policy", "schedule") if len(_values(results, axis)) > 1]
    axis = next((axis for axis in varying if axis in AXES), None)
    if axis is None or None in _values(results, axis):
        return []
    lines: dict[str, list[Result]] = {}
    for result in results:
        lines.setdefault(name_of(result, [v for v in varying if v != axis]), []).append(result)
    return [
        chart(
            title,
            axis.replace("_", " "),
            unit,
            [
                (name, sorted((float(r.figures[axis]), float(r.figures[key])) for r in those))
                for name, those in [*lines.items()][:MAX_LINES]
            ],
        )
        for key, title, unit in _CURVES
        if key in results[0].figures
    ]


def _distributions(results: Sequence[Result]) -> list[str]:
    varying = [name for name in _NAMES if len(_values(results, name)) > 1]
    shown = results[:MAX_LINES]
    return [
        chart(title, "ms", "share", [(name_of(r, varying), r.shares[key]) for r in shown])
        for key, title in _SHARES.items()
        if any(r.shares[key] for r in shown)
    ]


def name_of(result: Result, parts: Sequence[str]) -> str:
    """Name a scenario by the settings that vary."""
    return ", ".join(_NAMES[part].format(result.figures[part]) for part in parts)


def _values(results: Sequence[Result], name: str) -> set[Any]:
    return {result.figures[name] for result in results}


def _table(results: Sequence[Result]) -> str:
    columns = [each for each in COLUMNS if each[0] in results[0].figures]
    head = "".join(f"<th>{escape(title)}</th>" for _, title, _ in columns)
    rows = "".join(
        "<tr>"
        + "".join(
            f"<td>{escape(format(result.figures[key], spec))}</td>" for key, _, spec in columns
        )
        + "</tr>"
        for result in results
    )
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )

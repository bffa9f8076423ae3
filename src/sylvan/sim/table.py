"""Simulation results as text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sylvan.sim.profile import Profile
from sylvan.sim.scenarios import CapacityPlan, Result

COLUMNS = (
    ("load", "load", ""),
    ("replicas", "replicas", "d"),
    ("cache_tokens", "cache", "d"),
    ("policy", "policy", ""),
    ("schedule", "schedule", ""),
    ("goodput_share", "good", ".1%"),
    ("request_throughput", "req/s", ".2f"),
    ("output_throughput", "out tok/s", ".0f"),
    ("median_ttft_ms", "TTFT p50", ".1f"),
    ("p99_ttft_ms", "p99 (ms)", ".1f"),
    ("median_tpot_ms", "TPOT p50", ".2f"),
    ("p99_tpot_ms", "p99 (ms)", ".2f"),
    ("hit_rate", "hits", ".0%"),
    ("busy", "busy", ".0%"),
    ("failed", "failed", "d"),
)
DISTURBED = 0.2
"""Mean error of a step's duration at which the recorded machine was probably disturbed."""
_LEFT = frozenset({"load", "policy", "schedule"})


def table(results: Sequence[Result]) -> str:
    """Format a line per scenario."""
    columns = [each for each in COLUMNS if each[0] in results[0].figures]
    rows = [[title for _, title, _ in columns]]
    rows += [
        [format(result.figures[name], spec) for name, _, spec in columns] for result in results
    ]
    widths = [max(len(row[place]) for row in rows) for place in range(len(columns))]
    return "\n".join(
        "  ".join(
            f"{cell:{'<' if name in _LEFT else '>'}{width}}"
            for cell, width, (name, _, _) in zip(row, widths, columns, strict=True)
        ).rstrip()
        for row in rows
    )


def sentence(plan: CapacityPlan, slo: Mapping[str, str], share: float) -> str:
    """Say what a load needs."""
    figures = plan.best.figures
    wanted = ", ".join(f"{name} {bound} ms" for name, bound in slo.items())
    what = (
        f"{figures['replicas']} x {figures['cache_tokens']} tokens, {figures['policy']}, "
        f"{figures['schedule']}"
    )
    good = f"{figures['goodput_share']:.1%}"
    if plan.meets_slo:
        return f"{plan.load}: {what} is enough: {good} of requests meet {wanted}"
    return (
        f"{plan.load}: no setup meets {wanted} for {share:.1%} of requests; {what} does for {good}"
    )


def comparison(result: Result, measured: Mapping[str, object], errors: Mapping[str, float]) -> str:
    """Format simulated and measured figures side by side."""
    lines = [f"{'':24}{'measured':>12}{'simulated':>12}{'error':>9}"]
    for name, error in errors.items():
        values = f"{measured[name]:12.2f}{result.figures[name]:12.2f}"
        lines.append(f"{name:24}{values}{error:+9.1%}")
    return "\n".join(lines)


def warnings(results: Sequence[Result], profile: Profile) -> list[str]:
    """Return warnings about uncertain results."""
    most, found = profile.origin.max_rows, list[str]()
    larger = max(result.figures["max_rows"] for result in results)
    if most and larger > 2 * most:
        found.append(
            f"steps of up to {larger} rows were simulated, the profile has seen {most} at most: "
            "record a heavier load to be surer"
        )
    return [*found, *_disturbed(profile)]


def _disturbed(profile: Profile) -> list[str]:
    error = profile.origin.step_error
    if error <= DISTURBED:
        return []
    return [
        f"recorded steps took {error:.0%} more or less than steps like them: the machine did other "
        "things meanwhile; record again on one that does nothing else"
    ]


def described(profile: Profile) -> str:
    """Describe a profile in a few lines."""
    origin, step, host, request = profile.origin, profile.step, profile.host, profile.request
    alone = step.constant + step.sample
    return "\n".join(
        [
            f"fitted to {origin.steps} steps and {origin.requests} requests of {origin.recording}",
            f"mean error of a step's time: {origin.step_error:.1%}; the largest has "
            f"{origin.max_rows} rows",
            f"a step of one row {1e3 * alone:.3f} ms, the host {1e3 * host.constant:.3f} ms + "
            f"{1e3 * host.slice:.4f} ms for each request in it",
            f"outside the scheduler {1e3 * request.constant:.2f} ms a request"
            + ("" if origin.results else " (not known: no --results)"),
            *_disturbed(profile),
        ]
    )

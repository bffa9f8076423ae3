"""Results as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sylvan.bench.compare import LEVEL, Comparison
from sylvan.bench.metrics import PERCENTILES, TIMES
from sylvan.bench.results import Result

WIDTH = 56
_TITLES = {
    "e2e_latency": "End-to-end latency",
    "ttft": "Time to first token",
    "tpot": "Time per output token (without the first)",
    "itl": "Inter-token latency",
}


def table(result: Result) -> str:
    """Format a run."""
    lines = [_title("Serving benchmark result"), *_counts(result)]
    generates = result["total_output_tokens"] > 0
    for name in TIMES if generates else TIMES[:1]:
        lines.append(_title(_TITLES[name], "-"))
        words = ("mean", "median", *(f"p{percent}" for percent in PERCENTILES), "max")
        lines += [_row(f"{word} (ms)", f"{result[f'{word}_{name}_ms']:.2f}") for word in words]
    return "\n".join([*lines, "=" * WIDTH])


def comparison(rows: Sequence[Comparison]) -> str:
    """Format two results side by side."""
    head = f"{'':24}{'A':>12}{'B':>12}{'B / A':>9}  {LEVEL} % of B / A"
    return "\n".join([head, *(_compared(row) for row in rows)])


def _counts(result: Result) -> Iterable[str]:
    rate, limit = result["request_rate"], result["max_concurrency"]
    yield _row("API", str(result["backend"]))
    yield _row("Data set", str(result["dataset_name"]))
    yield _row("Request rate (1/s)", "no limit" if rate is None else f"{rate:g}")
    yield _row("Most requests at a time", "no limit" if limit is None else str(limit))
    yield _row("Successful requests", str(result["completed"]))
    yield _row("Failed requests", str(result["failed"]))
    yield _row("Duration (s)", f"{result['duration']:.2f}")
    yield _row("Input tokens", str(result["total_input_tokens"]))
    yield _row("Input tokens from the cache", str(result["total_cached_tokens"]))
    yield _row("Output tokens", str(result["total_output_tokens"]))
    yield _row("Request throughput (1/s)", f"{result['request_throughput']:.2f}")
    yield _row("Input token throughput (1/s)", f"{result['input_throughput']:.2f}")
    yield _row("Output token throughput (1/s)", f"{result['output_throughput']:.2f}")
    if result["steady_output_throughput"] is not None:
        yield _row("In the steady state (1/s)", f"{result['steady_output_throughput']:.2f}")
    yield _row("Peak output tokens in a second", f"{result['max_output_tokens_per_s']:.0f}")
    yield _row("Total token throughput (1/s)", f"{result['total_throughput']:.2f}")
    yield _row("Mean concurrency", f"{result['concurrency']:.2f}")
    yield _row("Peak concurrency", str(result["max_concurrent_requests"]))
    yield _row("p99 send delay (ms)", f"{result['send_delay_p99_ms']:.2f}")
    if result["accept_length"] is not None:
        yield _row("Accept length", f"{result['accept_length']:.2f}")
    if "goodput" in result:
        share = f"{100 * result['goodput_share']:.1f} %"
        yield _row("Goodput (requests/s)", f"{result['goodput']:.2f} ({share})")


def _title(text: str, fill: str = "=") -> str:
    return f" {text} ".center(WIDTH, fill)


def _row(name: str, value: str) -> str:
    return f"{name:36}{value:>20}"


def _compared(row: Comparison) -> str:
    bounds = "a single run" if row.low is None else f"{row.low:.3f} to {row.high:.3f}"
    mark = " *" if row.differs else ""
    return f"{row.name:24}{row.a:12.2f}{row.b:12.2f}{row.ratio:9.3f}  {bounds}{mark}"

"""Load test results, and the simulation's error relative to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from sylvan.protocol.errors import ConfigError

MAX_BYTES = 4 << 30
Time = Annotated[float, msgspec.Meta(ge=0)]


class MeasuredRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `sylvan bench serve --output FILE --output-details`; times in seconds.

    Fields are those of `bench.results.details`; the figures are in `figures`.
    """

    input_lens: tuple[int, ...]
    output_lens: tuple[int, ...]
    sent: tuple[Time, ...]
    ttfts: tuple[Time, ...]
    latencies: tuple[Time, ...]
    errors: tuple[str, ...]
    model: str = ""
    tag: str | None = None
    config: dict[str, Any] = {}
    figures: dict[str, Any] = {}

    @property
    def order(self) -> Sequence[int]:
        """Return the indices of the successful requests, in sending order."""
        places = [place for place, error in enumerate(self.errors) if not error]
        return sorted(places, key=lambda place: self.sent[place])


def measured(name: str) -> MeasuredRequest:
    """Return the last run in a results file.

    Raises:
        ConfigError: It is unreadable, or has no details of requests.
    """
    path = Path(name).expanduser()
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{name} is larger than {MAX_BYTES >> 30} GiB")
        lines = [line for line in path.read_bytes().splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(f"cannot read the results {name}: {error.strerror}") from error
    if not lines:
        raise ConfigError(f"{name} holds no results")
    try:
        found = msgspec.json.decode(lines[-1], type=MeasuredRequest)
        figures = msgspec.json.decode(lines[-1], type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{name}: {error}; it has to come from `sylvan bench serve --output FILE "
            "--output-details`"
        ) from error
    columns = (found.output_lens, found.sent, found.ttfts, found.latencies, found.errors)
    if any(len(column) != len(found.input_lens) for column in columns):
        raise ConfigError(f"{name}: its columns are of different lengths")
    return msgspec.structs.replace(found, figures=figures)


COMPARED = (
    "request_throughput",
    "output_throughput",
    "median_ttft_ms",
    "p90_ttft_ms",
    "p99_ttft_ms",
    "median_tpot_ms",
    "p99_tpot_ms",
    "median_e2e_latency_ms",
    "p99_e2e_latency_ms",
)


def errors(simulated: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, float]:
    """Return simulated over measured, minus 1, for each common figure."""
    return {
        name: float(simulated[name]) / float(found[name]) - 1
        for name in COMPARED
        if found.get(name) and simulated.get(name) is not None
    }

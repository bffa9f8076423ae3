"""Reports load tests: on the terminal, in a results file, as a page."""

from __future__ import annotations

from pathlib import Path

from sylvan.bench.load import Measured
from sylvan.bench.page import PageRun, page
from sylvan.bench.results import Result, append
from sylvan.bench.table import table
from sylvan.config.bench import ResultConfig


class Reports:
    """Receives the runs of a load test.

    Args:
        config: Where reports go besides the terminal.
    """

    def __init__(self, config: ResultConfig) -> None:
        self._config = config
        self._runs: list[PageRun] = []

    @property
    def good(self) -> bool:
        """Whether at least one request of each run succeeded."""
        return all(run.result["completed"] for run in self._runs)

    def add(self, result: Result, measured: Measured) -> None:
        """Report a finished run.

        Raises:
            ConfigError: The results file cannot be written.
        """
        self._runs.append(PageRun.of(result, measured))
        print(table(result), flush=True)
        for error, count in failures(measured):
            print(f"{count} failed: {error}", flush=True)
        if self._config.file is not None:
            append(self._config.file, result)
        if self._config.html is not None:  # after each run, because a sweep may be interrupted
            Path(self._config.html).expanduser().write_text(page(self._runs))


def failures(measured: Measured, most: int = 5) -> list[tuple[str, int]]:
    """Return the most frequent reasons of failures, with their counts."""
    counts: dict[str, int] = {}
    for outcome in measured.outcomes:
        if outcome.error:
            counts[outcome.error] = counts.get(outcome.error, 0) + 1
    return sorted(counts.items(), key=lambda item: -item[1])[:most]

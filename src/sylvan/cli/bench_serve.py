"""`sylvan bench serve`: put a server under load and measure it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from sylvan.bench.load import Measured
from sylvan.bench.page import Run, page
from sylvan.bench.results import Result, append
from sylvan.bench.run import check, measure
from sylvan.bench.table import table
from sylvan.cli.help import bench_markdown
from sylvan.cli.loop import fast_loop
from sylvan.cli.main import DONE, FAILED, Spec
from sylvan.cli.progress import counting_requests
from sylvan.config.bench import BenchConfig
from sylvan.config.env import client_key, config_file
from sylvan.config.flags import Option, Parsed
from sylvan.config.schema import BENCH
from sylvan.config.sources import gather_as

SPEC = Spec(
    usage="bench serve [flags]",
    doc="Put a server under load and measure it: rates, and times to the first token, between "
    "tokens and to the end. The server may be Sylvan, a gateway, or any other with the OpenAI API. "
    "Exit code 1 if no request succeeded.",
    options=(Option("markdown", "Print the reference of all settings."),),
    tree=BENCH,
    max_positions=0,
)


def run(args: Parsed) -> int:
    """See `SPEC`."""
    if args.has("markdown"):
        print(bench_markdown(), end="")
        return DONE
    file = args.options.get("config") or config_file()
    config = gather_as(BENCH, args.given, file=file).config
    check(config)
    runs: list[Run] = []

    def report(result: Result, measured: Measured) -> None:
        runs.append(Run.of(result, measured))
        print(table(result), flush=True)
        for error, count in failures(measured):
            print(f"{count} failed: {error}", flush=True)
        if config.result.file is not None:
            append(config.result.file, result)
        if config.result.html is not None:  # after each run: a sweep may be stopped
            Path(config.result.html).expanduser().write_text(page(runs))

    with asyncio.Runner(loop_factory=fast_loop()) as runner, counting_requests() as progress:
        runner.run(measure(config, headers(config), progress, report))
    return DONE if all(run.result["completed"] for run in runs) else FAILED


def headers(config: BenchConfig) -> dict[str, str]:
    """Headers of every request; the key is the one given, or that of the environment."""
    given = config.target.api_key
    key = given.reveal() if given is not None else client_key()
    authorization = {} if key is None else {"authorization": f"Bearer {key}"}
    return {**authorization, **config.target.headers}


def failures(measured: Measured, most: int = 5) -> list[tuple[str, int]]:
    """The most frequent reasons of failures, and how often each was seen."""
    counts: dict[str, int] = {}
    for outcome in measured.outcomes:
        if outcome.error:
            counts[outcome.error] = counts.get(outcome.error, 0) + 1
    return sorted(counts.items(), key=lambda item: -item[1])[:most]

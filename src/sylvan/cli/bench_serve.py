"""`sylvan bench serve`: load-tests a server."""

from __future__ import annotations

import asyncio

from sylvan.bench.run import check, measure
from sylvan.cli.bench_report import Reports
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
    if args.has("markdown"):
        print(bench_markdown(), end="")
        return DONE
    file = args.options.get("config") or config_file()
    config = gather_as(BENCH, args.given, file=file).config
    check(config)
    reports = Reports(config.result)
    with asyncio.Runner(loop_factory=fast_loop()) as runner, counting_requests() as progress:
        runner.run(measure(config, headers(config), progress, reports.add))
    return DONE if reports.good else FAILED


def headers(config: BenchConfig) -> dict[str, str]:
    """Return the headers of every request; the key is given, or from the environment."""
    given = config.target.api_key
    key = given.reveal() if given is not None else client_key()
    authorization = {} if key is None else {"authorization": f"Bearer {key}"}
    return {**authorization, **config.target.headers}

"""`sylvan bench offline`: measures an in-process engine, without HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from sylvan.bench.run import BenchSetup, check_load, run_all
from sylvan.cli.bench_report import Reports
from sylvan.cli.loop import fast_loop
from sylvan.cli.main import DONE, FAILED, Spec
from sylvan.cli.progress import counting_requests
from sylvan.config.env import config_file
from sylvan.config.flags import Parsed
from sylvan.config.load import LoadedConfig, Setting
from sylvan.config.schema import OFFLINE, SERVE, Root, Schema
from sylvan.config.sources import SourceSettings, combined, gather_as

SPEC = Spec(
    usage="bench offline [MODEL] [flags]",
    doc="Load MODEL in this process and load-test it: the same figures as `sylvan bench serve`, "
    "without HTTP. Takes the settings of `sylvan serve`, and those of `sylvan bench serve` except "
    "its target.",
    tree=OFFLINE,
)


def run(args: Parsed) -> int:
    from sylvan.bench import datasets
    from sylvan.bench.offline import InProcess
    from sylvan.runtime.engine.arguments import ServerArgs
    from sylvan.runtime.engine.engine import Engine  # `--help` needs no torch

    loaded = collect_settings(OFFLINE, args)
    config = loaded.config
    check_load(config)
    reports = Reports(config.result)
    with Engine(server_args=ServerArgs(**model_keywords(loaded.given))) as engine:
        work = datasets.load(config.data, engine.tokenizer)
        about: Mapping[str, Any] = engine.get_server_info()
        prepared = BenchSetup(InProcess(engine, config.answer), engine.config.model, about, work)
        with asyncio.Runner(loop_factory=fast_loop()) as runner, counting_requests() as progress:
            runner.run(run_all(prepared, config, OFFLINE, progress, reports.add))
    return DONE if reports.good else FAILED


def collect_settings(schema: Schema[Root], args: Parsed) -> LoadedConfig[Root]:
    """Return all settings; the first positional argument is the model.

    Raises:
        ConfigError: A setting is unknown, malformed or contradictory.
    """
    given = args.given
    if args.positions:
        word = Setting("model", args.positions[0], "flag", f"argument {args.positions[0]!r}")
        given = combined([given, SourceSettings((word,))])
    file = args.options.get("config") or config_file()
    return gather_as(schema, given, file=file, preset=args.options.get("preset"))


def model_keywords(given: Mapping[str, Setting]) -> dict[str, object]:
    """Return the settings of model and engine, as keywords of `sylvan.Engine`."""
    own = SERVE.fields
    return {
        path.replace(".", "__"): setting.value
        for path, setting in given.items()
        if path in own or path in SERVE.sections
    }

"""Runs one load test, from its settings to its results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from sylvan.bench import datasets
from sylvan.bench.apis import APIS
from sylvan.bench.client import (
    Client,
    TargetError,
    extra_fields,
    first_model,
    tokenizer_folder,
)
from sylvan.bench.datasets import images
from sylvan.bench.load import BenchRun, Measured, Progress
from sylvan.bench.metrics import summary
from sylvan.bench.results import Result, check_writable, details, origin
from sylvan.bench.target import BenchTarget, ServerTarget
from sylvan.bench.workload import BenchConversation
from sylvan.config.bench import BenchConfig, LoadConfig, LoadTest, TargetConfig
from sylvan.config.load import dump
from sylvan.config.objectives import bounds
from sylvan.config.schema import BENCH, Schema
from sylvan.config.sweep import loads
from sylvan.protocol.errors import ConfigError
from sylvan.text.tokenizer import Tokenizer

Report = Callable[[Result, Measured], None]
"""Called with each run when it has ended."""


@dataclass(frozen=True, slots=True)
class BenchSetup:
    """Shared by all runs of a load test.

    Attributes:
        target: The target.
        model: Model name in results.
        about: What the target reports about itself.
        work: The workload.
    """

    target: BenchTarget
    model: str
    about: Mapping[str, Any]
    work: Sequence[BenchConversation]


def check(config: BenchConfig) -> None:
    """Check settings before anything is sent.

    Raises:
        ConfigError: A setting is invalid; the message names it.
    """
    if config.target.api == "embeddings" and config.data.turns > 1:
        raise ConfigError("data.turns: there are no conversations with target.api embeddings")
    check_load(config)


def check_load(config: LoadTest) -> None:
    """Check settings before anything is loaded or sent, for any target.

    Raises:
        ConfigError: A setting is invalid; the message names it.
    """
    loads(config.load)
    bounds("result.goodput", config.result.goodput)
    if config.data.dataset == "image":
        _check_images(config)
    extra_fields(config.answer.extra_body)
    if config.load.timestamps and config.data.dataset != "trace":
        raise ConfigError("load.timestamps: only data.dataset trace has times")
    for name, setting in ((config.result.file, "result.file"), (config.result.html, "result.html")):
        if name is not None:
            check_writable(name, setting)
    if config.result.details and config.result.file is None:
        raise ConfigError("result.details needs result.file")


def _check_images(config: LoadTest) -> None:
    images.size_of(config.data.image_size)
    if not isinstance(config, BenchConfig) or config.target.api != "chat":
        raise ConfigError(
            "data.dataset image needs sylvan bench serve with target.api chat: the template of the "
            "server says where pictures stand in a prompt"
        )


async def measure(
    config: BenchConfig,
    headers: Mapping[str, str],
    progress: Progress,
    report: Report,
) -> None:
    """Run the load test, or each one of its sweep.

    Args:
        config: Checked configuration.
        headers: Headers of every request, including the key.
        progress: Called with the progress of a run.
        report: Called with each finished run.

    Raises:
        TargetError: The server is unusable, or answers no request.
        ConfigError: There is no tokenizer or data set.
    """
    target = config.target
    async with Client(target.url, headers=headers, timeout_s=target.timeout_s) as client:
        if target.ready_s:
            await client.wait_ready(target.ready_s)
        prepared = await _prepare(client, config)
        await run_all(prepared, config, BENCH, progress, report)


async def run_all(
    prepared: BenchSetup,
    config: LoadTest,
    schema: Schema[Any],
    progress: Progress,
    report: Report,
) -> None:
    """Run a load, or each one of a sweep.

    Args:
        prepared: Target and workload.
        config: Checked configuration.
        schema: Schema of `config`.
        progress: Called with the progress of a run.
        report: Called with each finished run.

    Raises:
        TargetError: The target answers no request.
    """
    for load in loads(config.load):
        await _run(prepared, config, load, schema, progress, report)


async def _prepare(client: Client, config: BenchConfig) -> BenchSetup:
    model = config.target.model or await first_model(client)
    folder = config.target.tokenizer or await tokenizer_folder(client)
    work = datasets.load(config.data, Tokenizer.load(folder))
    api = APIS[config.target.api](config.answer)
    server = ServerTarget(client, api, model, extra_fields(config.answer.extra_body))
    return BenchSetup(server, model, await _about(client), work)


async def _run(
    prepared: BenchSetup,
    config: LoadTest,
    load: LoadConfig,
    schema: Schema[Any],
    progress: Progress,
    report: Report,
) -> None:
    adapters = config.target if isinstance(config, BenchConfig) else TargetConfig()
    run = BenchRun(prepared.target, load, seed=config.data.seed, adapters=adapters)
    for outcome in await run.warm_up(prepared.work[0]):
        if outcome.error:
            raise TargetError(f"the first request failed: {outcome.error}")
    if load.flush_cache:
        await prepared.target.flush_cache()
    measured = await run.run(prepared.work, progress)
    result: dict[str, Any] = {
        "tag": config.result.tag,
        "backend": config.target.api if isinstance(config, BenchConfig) else "engine",
        "dataset_name": config.data.dataset,
        "model": prepared.model,
        "request_rate": load.rate,
        "max_concurrency": load.concurrency,
        **summary(measured, bounds("result.goodput", config.result.goodput)),
        "origin": origin(),
        "server_info": prepared.about,
        "config": dump(config, defaults=False, schema=schema),
    }
    if config.result.details:
        result |= details(measured.outcomes)
    report(msgspec.to_builtins(result), measured)


async def _about(client: Client) -> Mapping[str, Any]:
    """Ask the server about itself; only Sylvan and SGLang answer."""
    try:
        return await client.get("/server_info")
    except TargetError:
        return {}

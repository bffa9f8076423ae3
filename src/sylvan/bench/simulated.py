"""The workload of a simulation: the data set of a load test, and the load test to compare with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sylvan.bench import datasets
from sylvan.config.bench import DataConfig, LoadConfig
from sylvan.config.simulate import ArrivalConfig
from sylvan.protocol.errors import ConfigError
from sylvan.sim.datasets import Draft, drawn
from sylvan.sim.measured import MeasuredRequest
from sylvan.sim.workload import SimulatedTurn
from sylvan.text.tokenizer import Tokenizer


def asked(data: DataConfig, tokenizer: str | None) -> Draft:
    """Return the conversations of a data set; with a tokenizer, those of a load test.

    Raises:
        ConfigError: File or tokenizer are invalid, or the data set needs a tokenizer.
    """
    if data.dataset == "image":
        raise ConfigError(
            "data.dataset image cannot be simulated: only the server knows its tokens"
        )
    if tokenizer is None:
        return drawn(data)
    found = datasets.load(data, Tokenizer.load(tokenizer))
    if any(turn.messages for each in found for turn in each.turns):
        raise ConfigError(
            f"{data.path}: chats cannot be simulated: a template, which only the server knows, "
            "makes their prompts; give lines with prompt"
        )
    return [
        (
            [
                SimulatedTurn([np.asarray(turn.token_ids, np.int32)], turn.output_tokens)
                for turn in each.turns
            ],
            each.at_s,
        )
        for each in found
    ]


def settings_of(found: MeasuredRequest, name: str) -> tuple[DataConfig, ArrivalConfig]:
    """Return data and load settings of a load test.

    Raises:
        ConfigError: Its file has none, or it cannot be simulated.
    """
    api = found.config.get("target", {}).get("api", "native")
    if api not in ("native", "completions"):
        raise ConfigError(
            f"sim.against: {name} was measured with target.api {api}, which adds to prompts; "
            "measure with native or completions"
        )
    try:
        data = msgspec.convert(found.config.get("data", {}), DataConfig)
        load = msgspec.convert(found.config.get("load", {}), LoadConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"sim.against: {name}: config: {error}") from error
    figures = found.figures
    return data, ArrivalConfig(
        rate=figures.get("request_rate"),  # each run of a sweep has its own
        burstiness=load.burstiness,
        concurrency=figures.get("max_concurrency"),
        timestamps=load.timestamps,
        slowdown=load.slowdown,
        warmup=load.warmup,
    )


def tokenizer_of(found: MeasuredRequest, given: str | None, name: str) -> str:
    """Return the directory of the tokenizer that a load test used.

    Raises:
        ConfigError: It is not on this machine.
    """
    about: dict[str, Any] = found.figures.get("server_info") or {}
    target: dict[str, Any] = found.config.get("target", {})
    named = given or target.get("tokenizer") or about.get("tokenizer_path")
    named = named or about.get("model_path")
    if not isinstance(named, str) or not Path(named).expanduser().is_dir():
        raise ConfigError(
            f"sim.tokenizer: give the directory of the model's tokenizer (--tokenizer DIR): {name} "
            "names none that is on this machine"
        )
    return named

"""Parses settings with several loads, for load tests and simulations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from sylvan.config.bench import LoadConfig
from sylvan.config.fields import replaced
from sylvan.config.simulate import ArrivalConfig
from sylvan.protocol.errors import ConfigError

Load = TypeVar("Load", LoadConfig, ArrivalConfig)


def loads(config: Load) -> Sequence[Load]:
    """Return one load, or each load of `load.sweep`.

    Raises:
        ConfigError: an entry is neither a concurrency nor a rate.
    """
    found: list[Load] = []
    for word in config.sweep:
        number, slash, unit = word.strip().partition("/")
        try:
            value = float(number) if slash else int(number)
        except ValueError:
            value = 0
        if not 0 < value < float("inf") or (slash and unit != "s"):
            raise ConfigError(f"load.sweep: expected 8 (concurrency) or 2.5/s (rate), got {word!r}")
        found.append(replaced(config, {"rate" if slash else "concurrency": value}))
    return found or [config]

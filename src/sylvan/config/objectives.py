"""Latency targets of load tests and simulations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from sylvan.protocol.errors import ConfigError

Latency = Literal["ttft", "tpot", "e2e"]
"""Time to the first token, per output token after it, and to the end."""
Bounds = Mapping[Latency, float]
"""Targets in seconds, by latency."""
_NAMES = ("ttft", "tpot", "e2e")


def bounds(setting: str, given: Mapping[str, str]) -> Bounds:
    """Parse targets in milliseconds, such as `ttft=500,tpot=50`.

    Args:
        setting: Name of the setting, for errors.
        given: Its value.

    Raises:
        ConfigError: a name or number is invalid.
    """
    found: dict[Latency, float] = {}
    for name, text in given.items():
        try:
            bound_s = float(text) / 1000
        except ValueError:
            bound_s = -1.0
        if name not in _NAMES or not 0 < bound_s < float("inf"):
            known = ", ".join(_NAMES)
            raise ConfigError(f"{setting}: expected milliseconds for {known}, got {name}={text}")
        found[name] = bound_s
    return found

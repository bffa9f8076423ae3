"""Server settings that can change at run time, and how changes take effect."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from sylvan.config.keys import read_key_file
from sylvan.config.live import LiveSettings
from sylvan.config.tree import Config
from sylvan.runtime.server.body import Bodies
from sylvan.runtime.server.connections import ConnectionLimits, Connections
from sylvan.runtime.server.keyring import Keyring
from sylvan.runtime.server.settings import LIVE_OF_LIMITS, LIVE_OF_SERVER, CurrentSettings
from sylvan.runtime.tokenizer.manager import TokenizerManager
from sylvan.utils.logs import LogLevel

OF_CONNECTIONS = (
    *("connections", "connections_per_address", "head_bytes"),
    *("head_s", "body_s", "write_s"),
)
LIVE = frozenset(
    {
        *(f"server.{name}" for name in LIVE_OF_SERVER),
        *(f"limits.{name}" for name in (*OF_CONNECTIONS, *LIVE_OF_LIMITS)),
        "server.drain_s",
        "observe.log_level",
    }
)
"""Paths of settings that can change."""


@dataclass(frozen=True, slots=True)
class CallerSettings:
    """Settings for authentication and limits of calls.

    Attributes:
        current: The settings that routes read.
        keyring: Client keys.
        engine: Knows which adapters a tenant may use.
    """

    current: CurrentSettings
    keyring: Keyring
    engine: TokenizerManager

    def __call__(self, config: Config) -> Callable[[], None]:
        path = config.server.api_key_file
        entries = read_key_file(path) if path else []
        wanted = self.current.now.changed_by(config)

        def take() -> None:
            self.current.now = wanted
            self.keyring.replace(wanted.api_keys, entries)
            self.engine.adapters.limit(self.keyring.adapters)

        return take


def connection_settings(connections: Connections) -> Callable[[Config], Callable[[], None]]:
    """Make the settings of connections; changes apply to new connections."""

    def prepare(config: Config) -> Callable[[], None]:
        limits = ConnectionLimits.from_config(config.limits)
        return lambda: setattr(connections, "limits", limits)

    return prepare


def log_settings(level: LogLevel) -> Callable[[Config], Callable[[], None]]:
    """Make the setting of the log level."""
    return lambda config: functools.partial(level.change, config.observe.log_level)


def make_live(
    live: LiveSettings[Config],
    callers: CallerSettings,
    connections: Connections | None,
    bodies: Bodies,
) -> LiveSettings[Config]:
    """Register all settings that can change."""
    live.add(callers)
    live.add(
        lambda config: functools.partial(
            bodies.limit, callers.current.now.changed_by(config).bodies
        )
    )
    live.add(log_settings(LogLevel(live.now.observe.log_level)))
    if connections is not None:
        live.add(connection_settings(connections))
    return live

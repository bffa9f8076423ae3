"""Gateway settings that can change at run time, and how changes take effect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sylvan.config.keys import read_key_file
from sylvan.config.route import RouteConfig
from sylvan.gateway.flow.admission import GatewayAdmission
from sylvan.gateway.security.clients import Clients
from sylvan.gateway.security.operators import Operators, operator_keys
from sylvan.utils.logs import LogLevel

_LIMITS = ("max_concurrent", "queue_size", "queue_timeout_s", "rate_per_s")
_CONNECTIONS = (
    *("connections", "connections_per_address", "head_bytes", "head_s", "body_s"),
    "slow_client_s",
)
_ROUTING = (
    *("policy", "prefill_policy", "decode_policy", "cache_threshold", "balance_abs_threshold"),
    *("balance_rel_threshold", "prefix_tokens", "load_factor", "assignment", "max_idle_s"),
    "bucket_adjust_s",
)
LIVE = frozenset(
    {
        *("server.api_key", "server.api_key_file", "server.drain_s", "control.api_keys"),
        *(f"limits.{name}" for name in (*_LIMITS, *_CONNECTIONS)),
        *(f"routing.{name}" for name in _ROUTING),
        "observe.log_level",
    }
)
"""Paths of settings that can change."""


@dataclass(frozen=True, slots=True)
class GatewayCallerSettings:
    """Settings for authentication, admission and logging.

    Attributes:
        clients: Client keys.
        operators: Operator keys.
        admission: Admission limits.
        level: Log level.
    """

    clients: Clients
    operators: Operators
    admission: GatewayAdmission
    level: LogLevel

    def __call__(self, config: RouteConfig) -> Callable[[], None]:
        path = config.server.api_key_file
        entries = read_key_file(path) if path else []
        keys = operator_keys(config.control.api_keys)

        def take() -> None:
            self.clients.replace(config.server.api_key, entries)
            self.operators.replace(keys)
            self.admission.change(config.limits)
            self.level.change(config.observe.log_level)

        return take

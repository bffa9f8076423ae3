"""Configuration of the HTTP server."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from sylvan.api.native import RequestBodyLimits
from sylvan.api.strict_json import JsonLimits
from sylvan.config.chaos import NONE, Faults, read_faults
from sylvan.config.tree import (
    Config,
    DisaggConfig,
    LimitsConfig,
    ObserveConfig,
    ServerConfig,
    TextConfig,
)
from sylvan.config.values import Secret
from sylvan.runtime.server.body import BodyLimits
from sylvan.runtime.serving.sessions import SessionLimits

MAX_TOP_LOGPROBS = 128
LIVE_OF_SERVER = ("api_key", "api_key_file", "admin_api_key", "gateway_key", "max_body_bytes")
"""Fields of the section `server` that routes read for each call."""
LIVE_OF_LIMITS = (
    *("text_chars", "samples", "parameter_bytes", "stored_bytes"),
    *("bodies_bytes", "body_values", "body_depth", "body_names"),
)
"""Fields of the section `limits` that routes read for each call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """The configuration sections that the HTTP server reads.

    Attributes:
        served_model_name: Model name in answers.
        server: Listening address, keys, and stores.
        text: Prompts and answers.
        limits: Limits for clients.
        observe: Logs, metrics, traces and reports.
        disagg: Prefill-decode disaggregation; None: off.
        faults: Fault injection.
        shown: Resolved configuration for `/server_info`, without secrets.
    """

    served_model_name: str = "default"
    server: ServerConfig = field(default_factory=ServerConfig)
    text: TextConfig = field(default_factory=TextConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    disagg: DisaggConfig | None = None
    faults: Faults = NONE
    shown: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def from_config(cls, config: Config, shown: Mapping[str, Any] | None = None) -> ServerSettings:
        """Read a resolved configuration; `shown` is for `/server_info`."""
        return cls(
            served_model_name=config.served_model_name or Path(config.model).name,
            server=config.server,
            text=config.text,
            limits=config.limits,
            observe=config.observe,
            disagg=config.disagg,
            faults=read_faults(config.chaos),
            shown=shown or {},
        )

    def changed_by(self, config: Config) -> ServerSettings:
        """Return these settings, with run-time changeable ones taken from a configuration."""
        server = {name: getattr(config.server, name) for name in LIVE_OF_SERVER}
        limits = {name: getattr(config.limits, name) for name in LIVE_OF_LIMITS}
        return replace(
            self,
            server=msgspec.structs.replace(self.server, **server),
            limits=msgspec.structs.replace(self.limits, **limits),
        )

    @property
    def host(self) -> str:
        """The listening address; decides whether optional-admin routes may be open."""
        return self.server.host if self.server.uds is None else "localhost"

    @property
    def allowed_hosts(self) -> tuple[str, ...]:
        """Host names by which clients may call the server; "*" for all."""
        # web pages cannot reach a Unix socket, and its clients may send any host name
        return self.server.allowed_hosts if self.server.uds is None else ("*",)

    @property
    def api_keys(self) -> tuple[Secret, ...]:
        """Keys of ordinary clients; without any, everyone is a client."""
        return (self.server.api_key,) if self.server.api_key else ()

    @property
    def bodies(self) -> BodyLimits:
        """Limits of request bodies."""
        limits = self.limits
        return BodyLimits(
            each=self.server.max_body_bytes,
            together=limits.bodies_bytes,
            json=JsonLimits(
                depth=limits.body_depth, values=limits.body_values, names=limits.body_names
            ),
        )

    @property
    def sessions(self) -> SessionLimits:
        """Limits of sessions."""
        return SessionLimits(
            sessions=self.limits.sessions,
            tokens=self.limits.session_tokens,
            rest_s=self.limits.retention_s,
        )

    @property
    def role(self) -> Literal["prefill", "decode"] | None:
        """The initial disaggregation role; None: both roles."""
        return self.disagg.role if self.disagg is not None else None

    @property
    def switches_role(self) -> bool:
        """Whether the role may change at run time."""
        return self.disagg is not None and self.disagg.switchable

    @property
    def trusting(self) -> bool:
        """Whether no key is configured, so that anyone who can connect may call."""
        return self.loopback and not (self.api_keys or self.server.api_key_file)

    @property
    def loopback(self) -> bool:
        """Whether only local programs can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


@dataclass(slots=True)
class CurrentSettings:
    """The settings in force; some can change at run time.

    Attributes:
        now: The settings; replaced as a whole.
    """

    now: ServerSettings

    def bounds(self) -> RequestBodyLimits:
        """Limits of a body."""
        return RequestBodyLimits(
            max_samples=self.now.limits.samples, max_top_logprobs=MAX_TOP_LOGPROBS
        )

"""What the operator decides about the HTTP face."""

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
"""Fields of the section `server` that routes read anew for each call."""
LIVE_OF_LIMITS = (
    *("text_chars", "samples", "parameter_bytes", "stored_bytes"),
    *("bodies_bytes", "body_values", "body_depth", "body_names"),
)
"""The same of the section `limits`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """The sections of the configuration that the HTTP face reads, as they are.

    Attributes:
        served_model_name: The name of the model in every answer.
        server: Where it listens, keys, and what is kept.
        text: Prompts and answers.
        limits: What clients may use.
        observe: Logs, metrics, traces and reports.
        disagg: Prefill and decode on different servers; None: this one does everything.
        faults: What goes wrong because somebody asked for it.
        shown: Resolved configuration for `/server_info`, free of secrets.
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
        """Those of a resolved configuration; `shown` is for `/server_info`."""
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
        """These, with what can change while a server runs taken from a configuration."""
        server = {name: getattr(config.server, name) for name in LIVE_OF_SERVER}
        limits = {name: getattr(config.limits, name) for name in LIVE_OF_LIMITS}
        return replace(
            self,
            server=msgspec.structs.replace(self.server, **server),
            limits=msgspec.structs.replace(self.limits, **limits),
        )

    @property
    def host(self) -> str:
        """Where the server listens; decides whether optional-admin routes may be open."""
        return self.server.host if self.server.uds is None else "localhost"

    @property
    def allowed_hosts(self) -> tuple[str, ...]:
        """Names by which clients may call the server; "*" for all."""
        # no page reaches a unix socket, and clients of one may say any name
        return self.server.allowed_hosts if self.server.uds is None else ("*",)

    @property
    def api_keys(self) -> tuple[Secret, ...]:
        """Keys of ordinary clients; without any, everyone is one."""
        return (self.server.api_key,) if self.server.api_key else ()

    @property
    def bodies(self) -> BodyLimits:
        """Bounds on request bodies."""
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
        """Bounds on sessions."""
        return SessionLimits(
            sessions=self.limits.sessions,
            tokens=self.limits.session_tokens,
            rest_s=self.limits.retention_s,
        )

    @property
    def role(self) -> Literal["prefill", "decode"] | None:
        """What this server does of a request at first; None: everything."""
        return self.disagg.role if self.disagg is not None else None

    @property
    def switches_role(self) -> bool:
        """Whether that may change while it runs."""
        return self.disagg is not None and self.disagg.switchable

    @property
    def trusting(self) -> bool:
        """Whether nothing but the reach of this machine decides who may call."""
        return self.loopback and not (self.api_keys or self.server.api_key_file)

    @property
    def loopback(self) -> bool:
        """Whether only programs of this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


@dataclass(slots=True)
class CurrentSettings:
    """The settings that are in force: some change while the server runs.

    Attributes:
        now: They are replaced as a whole.
    """

    now: ServerSettings

    def bounds(self) -> RequestBodyLimits:
        """Bounds on one body."""
        return RequestBodyLimits(
            max_samples=self.now.limits.samples, max_top_logprobs=MAX_TOP_LOGPROBS
        )

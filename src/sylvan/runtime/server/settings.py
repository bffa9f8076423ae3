"""What the operator decides about the HTTP face."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sylvan.config.tree import (
    Config,
    DisaggConfig,
    LimitsConfig,
    ObserveConfig,
    ServerConfig,
    TextConfig,
)
from sylvan.config.values import Secret


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
        shown: Resolved configuration for `/server_info`, free of secrets.
    """

    served_model_name: str = "default"
    server: ServerConfig = field(default_factory=ServerConfig)
    text: TextConfig = field(default_factory=TextConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    disagg: DisaggConfig | None = None
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
            shown=shown or {},
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

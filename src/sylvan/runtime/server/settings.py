"""What the operator decides about the HTTP face."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sylvan.api.strict_json import JsonLimits
from sylvan.config.chaos import NONE, Faults, read_faults
from sylvan.config.tree import Config, ObserveConfig
from sylvan.config.values import Secret
from sylvan.runtime.server.body import BodyLimits
from sylvan.runtime.server.stores.sessions import SessionLimits


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """Settings of the HTTP face.

    Attributes:
        host: Where the server listens; decides whether optional-admin routes may be open.
        port: Where the server listens.
        root_path: Path prefix under which a proxy shows the server.
        access_log: Log one line per call.
        observe: Logs, metrics, traces and reports.
        metrics: Serve `/metrics`.
        served_model_name: The name of the model in every answer.
        api_keys: Keys of ordinary clients; without any, everyone is one.
        api_key_file: JSON file of hashed keys with tenants and budgets.
        admin_api_key: Key of the operator.
        gateway_key: By which gateways are known.
        cors_origins: Web origins whose pages may call the server; "*" for all.
        allowed_hosts: Names by which clients may call the server; "*" for all.
        bodies: Bounds on request bodies.
        sessions: Bounds on sessions.
        calls_per_tenant: Calls of one tenant that are under way.
        incremental_streaming_output: Native streams carry deltas rather than the text so far.
        enable_cache_report: Usage always names cached tokens.
        stream_include_usage: Streams end with usage even if the client did not ask.
        sampling_defaults: Whether `generation_config.json` fills fields that a request lacks.
        preferred_sampling_params: Defaults of the operator, below the request's own.
        default_chat_template_kwargs: Variables for every chat template rendering.
        tool_parser: Name of the parser of tool calls; "auto" asks the model; None: none.
        shared_system_prompts: Files with system prompts whose cache all tenants share.
        allow_control_text: Control tokens that messages spell count.
        reasoning_parser: Likewise for reasoning.
        max_text_chars: Most characters that a route takes which only reads text.
        max_batch_samples: Largest number of prompts times samples in one request.
        max_parameter_bytes: Largest size of the parameters of one request, for all its samples.
        max_top_logprobs: Largest number of alternatives per position.
        max_response_bytes: Size of all stored `/v1/responses` objects together.
        max_stored_bytes: Size of all files and batches of one tenant.
        retention_s: Age at which files, ended batches and stored responses are forgotten.
        response_store_size: Stored `/v1/responses` objects kept; 0 turns storing off.
        data_dir: Where files and batches live; None: in memory, until the process ends.
        faults: What goes wrong because somebody asked for it.
        role: What this server does of a request at first; None: everything.
        switches_role: Whether that may change while it runs.
        bootstrap_port: Of prefill servers, for requests that name none.
        shown: Resolved configuration for `/server_info`, free of secrets.
    """

    host: str = "127.0.0.1"
    port: int = 30000
    served_model_name: str = "default"
    api_keys: tuple[Secret, ...] = ()
    api_key_file: str | None = None
    admin_api_key: Secret | None = None
    gateway_key: Secret | None = None
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    root_path: str = ""
    access_log: bool = False
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    metrics: bool = True
    bodies: BodyLimits = field(default_factory=BodyLimits)
    sessions: SessionLimits = field(default_factory=SessionLimits)
    calls_per_tenant: int = 2048
    incremental_streaming_output: bool = False
    enable_cache_report: bool = True
    stream_include_usage: bool = False
    sampling_defaults: Literal["model", "openai"] = "model"
    preferred_sampling_params: Mapping[str, Any] = field(default_factory=dict)
    default_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    shared_system_prompts: tuple[str, ...] = ()
    allow_control_text: bool = False
    tool_parser: str | None = "auto"
    reasoning_parser: str | None = "auto"
    max_text_chars: int = 1 << 20
    max_batch_samples: int = 4096
    max_parameter_bytes: int = 64 << 20
    max_top_logprobs: int = 128
    max_response_bytes: int = 256 << 20
    max_stored_bytes: int = 1 << 30
    retention_s: float = 30 * 86_400.0
    response_store_size: int = 1024
    data_dir: str | None = None
    faults: Faults = NONE
    role: Literal["prefill", "decode"] | None = None
    switches_role: bool = False
    bootstrap_port: int = 8998
    shown: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_config(cls, config: Config, shown: Mapping[str, Any] | None = None) -> ServerSettings:
        """The settings that a resolved configuration means; `shown` is for `/server_info`."""
        server, text = config.server, config.text
        return cls(
            host=server.host if server.uds is None else "localhost",
            port=server.port,
            served_model_name=config.served_model_name or Path(config.model).name,
            api_keys=(server.api_key,) if server.api_key else (),
            api_key_file=server.api_key_file,
            admin_api_key=server.admin_api_key,
            gateway_key=server.gateway_key,
            cors_origins=server.cors_origins,
            # no page reaches a unix socket, and clients of one may say any name
            allowed_hosts=server.allowed_hosts if server.uds is None else ("*",),
            root_path=server.root_path,
            access_log=server.access_log,
            observe=config.observe,
            bodies=_body_limits(config),
            sessions=SessionLimits(
                sessions=config.limits.sessions,
                tokens=config.limits.session_tokens,
                rest_s=config.limits.retention_s,
            ),
            calls_per_tenant=config.limits.calls_per_tenant,
            max_text_chars=config.limits.text_chars,
            max_batch_samples=config.limits.samples,
            max_parameter_bytes=config.limits.parameter_bytes,
            max_response_bytes=config.limits.response_bytes,
            max_stored_bytes=config.limits.stored_bytes,
            retention_s=config.limits.retention_s,
            data_dir=server.data_dir,
            faults=read_faults(config.chaos),
            incremental_streaming_output=text.incremental_stream,
            enable_cache_report=text.cache_report,
            stream_include_usage=text.stream_include_usage,
            sampling_defaults=text.sampling_defaults,
            preferred_sampling_params=text.preferred_sampling_params,
            default_chat_template_kwargs=text.default_chat_template_kwargs,
            response_store_size=server.response_store_size,
            shared_system_prompts=text.shared_system_prompts,
            allow_control_text=text.allow_control_text,
            tool_parser=_parser(text.tool_parser),
            reasoning_parser=_parser(text.reasoning_parser),
            role=config.disagg.role if config.disagg is not None else None,
            switches_role=config.disagg is not None and config.disagg.switchable,
            shown=shown or {},
        )

    @property
    def trusting(self) -> bool:
        """Whether nothing but the reach of this machine decides who may call."""
        return self.loopback and not (self.api_keys or self.api_key_file)

    @property
    def loopback(self) -> bool:
        """Whether only programs of this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def _body_limits(config: Config) -> BodyLimits:
    limits = config.limits
    return BodyLimits(
        each=config.server.max_body_bytes,
        together=limits.bodies_bytes,
        json=JsonLimits(
            depth=limits.body_depth, values=limits.body_values, names=limits.body_names
        ),
    )


def _parser(name: str | None) -> str | None:
    return None if name == "none" else name

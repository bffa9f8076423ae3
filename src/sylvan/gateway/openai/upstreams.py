"""Upstream servers of the OpenAI API, as configured by the operator."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
import yaml

from sylvan.config.env import variable
from sylvan.config.route import RouteConfig
from sylvan.protocol.errors import ConfigError

ENVIRONMENT = "env:"
"""A key with this prefix names an environment variable."""
MAX_FALLBACKS = 8

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class UpstreamSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One server.

    Attributes:
        url: Base address, without `/chat/completions`: `https://api.openai.com/v1`.
        name: Name in logs and messages; default: its host.
        api_key: Its key, or `env:NAME`. Without one, clients' keys are forwarded.
        models: Clients' model names mapped to the server's; or a list where they are the same.
            Empty: ask the server.
    """

    url: Annotated[str, msgspec.Meta(min_length=1, max_length=2048)]
    name: str = ""
    api_key: str | None = None
    models: dict[Name, Name] | list[Name] = []

    @property
    def shown(self) -> str:
        """The name in logs and messages."""
        return self.name or urlsplit(self.url).hostname or self.url

    @property
    def aliases(self) -> Mapping[str, str]:
        """Clients' model names, mapped to the server's."""
        if isinstance(self.models, dict):
            return self.models
        return {name: name for name in self.models}


class Upstreams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of `providers.file`.

    Attributes:
        upstreams: The servers; of those with the same model the first is tried first.
        fallbacks: Fallback models, in order, for a model that no server serves now.
    """

    upstreams: list[UpstreamSpec] = []
    fallbacks: dict[Name, Annotated[list[Name], msgspec.Meta(max_length=MAX_FALLBACKS)]] = {}


def read_upstreams(config: RouteConfig) -> Upstreams:
    """Read and check the upstreams of a configuration.

    Raises:
        ConfigError: There are none, the file is unreadable, or an address or key is invalid.
    """
    providers = config.providers
    assert providers is not None, "providers is configured"
    found = Upstreams() if providers.file is None else _read(Path(providers.file))
    key = config.workers.api_key.reveal() if config.workers.api_key else None
    plain = [
        UpstreamSpec(url=_with_version(url), api_key=key)
        for url in (*providers.urls, *config.workers.urls)
    ]
    specs = [_checked(spec) for spec in (*found.upstreams, *plain)]
    if not specs:
        raise ConfigError("providers: give an upstream, in providers.file or providers.urls")
    return Upstreams(upstreams=specs, fallbacks=found.fallbacks)


def _read(path: Path) -> Upstreams:
    try:
        text = path.read_text("utf-8")
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
        return msgspec.convert(content, Upstreams)
    except (OSError, ValueError, yaml.YAMLError) as error:  # ValidationError is a ValueError
        raise ConfigError(f"providers.file: {path}: {error}") from error


def _checked(spec: UpstreamSpec) -> UpstreamSpec:
    parts = urlsplit(spec.url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise ConfigError(f"providers: {spec.url[:200]!r} is not the address of a server")
    key = spec.api_key
    if key is not None and key.startswith(ENVIRONMENT):
        name = key.removeprefix(ENVIRONMENT)
        key = variable(name)
        if not key:
            raise ConfigError(f"providers: {spec.shown}: the variable {name} is not set")
    return msgspec.structs.replace(spec, url=spec.url.rstrip("/"), api_key=key)


def _with_version(url: str) -> str:
    """Add the usual path to an address without one."""
    return url if urlsplit(url).path.strip("/") else url.rstrip("/") + "/v1"

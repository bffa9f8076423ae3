"""Servers of the OpenAI API, as the operator describes them."""

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
"""A key that begins so is the value of a variable."""
MAX_FALLBACKS = 8

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class UpstreamSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One server.

    Attributes:
        url: Its address up to and without `/chat/completions`: `https://api.openai.com/v1`.
        name: For logs and messages; default: its host.
        api_key: Its key, or `env:NAME`. Without one, clients' keys are passed on.
        models: Names for clients, and those that the server has for them; a list where they are the
            same. Empty: the server is asked for them.
    """

    url: Annotated[str, msgspec.Meta(min_length=1, max_length=2048)]
    name: str = ""
    api_key: str | None = None
    models: dict[Name, Name] | list[Name] = []

    @property
    def shown(self) -> str:
        """Its name for people."""
        return self.name or urlsplit(self.url).hostname or self.url

    @property
    def aliases(self) -> Mapping[str, str]:
        """Names of models for clients, and those of the server."""
        if isinstance(self.models, dict):
            return self.models
        return {name: name for name in self.models}


class Upstreams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of `providers.file`.

    Attributes:
        upstreams: Servers; of those that have a model the first is asked first.
        fallbacks: Models that stand in for a model that no server serves now, in order.
    """

    upstreams: list[UpstreamSpec] = []
    fallbacks: dict[Name, Annotated[list[Name], msgspec.Meta(max_length=MAX_FALLBACKS)]] = {}


def read_upstreams(config: RouteConfig) -> Upstreams:
    """All upstreams of a configuration, checked.

    Raises:
        ConfigError: There is none, the file cannot be used, or an address or key is none.
    """
    providers = config.providers
    assert providers is not None, "asked for where it is on"
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
        raise ConfigError(f"providers: {spec.url[:200]!r} is no address of a server")
    key = spec.api_key
    if key is not None and key.startswith(ENVIRONMENT):
        name = key.removeprefix(ENVIRONMENT)
        key = variable(name)
        if not key:
            raise ConfigError(f"providers: {spec.shown}: the variable {name} is not set")
    return msgspec.structs.replace(spec, url=spec.url.rstrip("/"), api_key=key)


def _with_version(url: str) -> str:
    """An address without a path gets the usual one."""
    return url if urlsplit(url).path.strip("/") else url.rstrip("/") + "/v1"

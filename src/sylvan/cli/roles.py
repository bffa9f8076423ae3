"""`sylvan serve --pd P:D`: prefill and decode servers behind one gateway."""

from __future__ import annotations

import re
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from sylvan.cli.replicas import HOST, ReplicaSpec
from sylvan.config.flags import Parsed
from sylvan.config.load import Setting
from sylvan.config.route import RouteConfig
from sylvan.config.sources import SourceSettings, combined
from sylvan.protocol.errors import ConfigError

SECRET_BYTES = 32
_SHAPE = re.compile(r"([1-9]\d{0,3}):([1-9]\d{0,3})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Roles:
    """Number of prefill servers, and of decode servers."""

    prefill: int
    decode: int


def read_roles(args: Parsed) -> tuple[Parsed, Roles | None]:
    """Return the command line with the number of servers that `--pd` requests, and their roles.

    Raises:
        ConfigError: `--pd` is malformed, or was combined with `--dp`.
    """
    if not args.has("pd"):
        return args, None
    text = args.options["pd"]
    found = _SHAPE.fullmatch(text)
    if found is None:
        raise ConfigError(f"--pd: expected PREFILL:DECODE, such as 1:1, got {text!r}")
    if any(setting.path == "server.replicas" for setting in args.given.settings):
        raise ConfigError("--pd and --dp exclude each other: --pd sets the number of servers")
    roles = Roles(int(found[1]), int(found[2]))
    count = Setting("server.replicas", roles.prefill + roles.decode, "flag", f"--pd {text}")
    return replace(args, given=combined([args.given, SourceSettings((count,))])), roles


def with_roles(specs: Sequence[ReplicaSpec], roles: Roles, folder: Path) -> list[ReplicaSpec]:
    """Assign roles to servers, prefill first.

    Args:
        specs: As many as there are roles.
        roles: Number of each.
        folder: Private directory for the servers' shared secret.
    """
    secret = folder / "disagg-secret"
    secret.touch(mode=0o600)
    secret.write_text(secrets.token_hex(SECRET_BYTES))
    ports = _free_ports(len(specs))
    found: list[ReplicaSpec] = []
    for spec in specs:
        section = {"secret_file": str(secret), **spec.settings.get("disagg", {}), "role": "decode"}
        if spec.number < roles.prefill:
            section["role"] = "prefill"
        if section["role"] == "prefill" or section.get("switchable"):
            section["bootstrap_port"] = ports[spec.number]
        found.append(replace(spec, settings={**spec.settings, "disagg": section}))
    return found


def paired(config: RouteConfig, specs: Sequence[ReplicaSpec]) -> RouteConfig:
    """Return the gateway's configuration for servers with roles."""
    prefill: list[str] = []
    decode: list[str] = []
    for spec in specs:
        section = spec.settings["disagg"]
        if section["role"] == "prefill":
            prefill.append(f"{spec.url}#{section['bootstrap_port']}")
        else:
            decode.append(spec.url)
    workers = msgspec.structs.replace(
        config.workers, urls=(), prefill_urls=tuple(prefill), decode_urls=tuple(decode)
    )
    return msgspec.structs.replace(config, workers=workers)


def _free_ports(count: int) -> list[int]:
    """Return distinct free ports; a server whose port was taken meanwhile reports that."""
    held = [socket.socket() for _ in range(count)]
    try:
        for sock in held:
            sock.bind((HOST, 0))
        return [sock.getsockname()[1] for sock in held]
    finally:
        for sock in held:
            sock.close()

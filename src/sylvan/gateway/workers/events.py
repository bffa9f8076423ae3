"""Finds where a worker publishes its cache events."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

EVENT_SETTINGS = ("kv_events", "kv_events_config")
"""Keys in `/server_info`: Sylvan's, SGLang's."""
_ADDRESS = re.compile(r"tcp://(\[[^\]]+\]|[^:/\[\]]+):(\d{1,5})\Z")
_ANY = ("*", "0.0.0.0", "[::]")  # the wildcard address of a server that listens on all interfaces


@dataclass(frozen=True, slots=True)
class EventSource:
    """A publisher of cache events.

    Attributes:
        endpoint: Address of its PUB socket.
        replay_endpoint: Address of its replay socket.
        topic: First frame of its messages.
        is_plain: Hashes are Sylvan's, which identify plain prompts.
    """

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    is_plain: bool = False


def event_source(info: Mapping[str, Any], url: str, rank: int | None = None) -> EventSource | None:
    """Return the publisher that `/server_info` names; None if there is none, or it is unreachable.

    Args:
        info: `/server_info`, with `kv_events` (Sylvan) or `kv_events_config` (SGLang).
        url: The server's address.
        rank: Data-parallel rank; each rank publishes on its own port, numbered consecutively.
    """
    given, is_plain = info.get("kv_events"), True
    if given is None:
        given, is_plain = info.get("kv_events_config"), False
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            return None
    if not isinstance(given, dict):
        return None
    settings = cast("dict[str, Any]", given)
    if settings.get("publisher", "zmq") != "zmq":
        return None
    endpoint = reachable(settings.get("endpoint"), url, rank or 0)
    topic = settings.get("topic") or ""
    if endpoint is None or not isinstance(topic, str):
        return None
    replay = reachable(settings.get("replay_endpoint"), url, rank or 0)
    return EventSource(endpoint, replay, topic, is_plain)


def reachable(address: object, url: str, offset: int = 0) -> str | None:
    """Return the address of a server's socket as seen from outside; None if it is unreachable.

    Args:
        address: Address on which the server listens.
        url: Address of the server.
        offset: Added to the port.
    """
    found = _ADDRESS.match(address) if isinstance(address, str) else None
    if found is None:
        return None
    host, port = found[1], int(found[2]) + offset
    there = urlsplit(url).hostname or ""
    if host in _ANY:
        host = f"[{there}]" if ":" in there else there
    elif _is_loopback(host.strip("[]")) and not _is_loopback(there):
        return None
    return f"tcp://{host}:{port}" if 0 < port < 65536 else None


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

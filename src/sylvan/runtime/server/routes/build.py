"""Constructors of endpoints with the defaults of their API."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sylvan.api.errors import Family
from sylvan.runtime.server.endpoint import Endpoint
from sylvan.runtime.server.security import Level

SSE = "text/event-stream"
NDJSON = "application/x-ndjson"
GET = ("GET",)
GET_POST = ("GET", "POST")


def openai(path: str, **fields: Any) -> Endpoint:
    """Make a route of the OpenAI API."""
    return Endpoint(
        **{"path": path, "family": Family.OPENAI, "tag": "OpenAI", "typed": True, **fields}
    )


def admin(path: str, **fields: Any) -> Endpoint:
    """Make a route for operators."""
    return Endpoint(**{"path": path, "level": Level.ADMIN_OPTIONAL, "tag": "Control", **fields})


def own(path: str, **fields: Any) -> Endpoint:
    """Make a route for operators, and for tenants concerning their own objects."""
    return admin(path, **{"level": Level.OWN_OR_ADMIN, "budgeted": True, **fields})


def opened(path: str, **fields: Any) -> Endpoint:
    """Make a route for everyone."""
    return Endpoint(**{"path": path, "level": Level.OPEN, "methods": GET, **fields})


def aliases(endpoint: Endpoint, *paths: str) -> tuple[Endpoint, ...]:
    """Make the endpoint available under further paths."""
    return endpoint, *(replace(endpoint, path=path) for path in paths)

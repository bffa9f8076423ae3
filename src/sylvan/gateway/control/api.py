"""Shared by the gateway's own routes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from sylvan.api.errors import Family
from sylvan.gateway.http.caller import Caller

Level = Literal["open", "client", "operator"]
Params = Mapping[str, str]
Handler = Callable[[Caller, Params], Awaitable[None]]

TEXT = (("content-type", "text/plain; charset=utf-8"),)
METRICS = (("content-type", "text/plain; version=0.0.4; charset=utf-8"),)


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnRoute:
    """A route that the gateway answers itself.

    Attributes:
        path: Path, as in `ProxyRoute`.
        handler: Answers the request.
        methods: HTTP methods.
        level: Required access level.
        family: API whose error format is used.
    """

    path: str
    handler: Handler
    methods: tuple[str, ...] = ("GET",)
    level: Level = "client"
    family: Family = Family.NATIVE

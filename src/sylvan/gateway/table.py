"""Matches paths to routes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sylvan.gateway.control.api import OwnRoute
from sylvan.gateway.http.routes import ProxyRoute

Route = OwnRoute | ProxyRoute


@dataclass(frozen=True, slots=True)
class RouteMatch:
    """A matched route, and its path parameters."""

    route: Route
    params: Mapping[str, str]


class RouteTable:
    """Routes by path and method. `{name}` in a path matches one segment."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._exact: dict[str, dict[str, Route]] = {}
        self._patterns: dict[int, list[tuple[tuple[str, ...], dict[str, Route]]]] = {}
        for route in routes:
            methods = self._methods_of(route.path)
            for method in route.methods:
                methods.setdefault(method, route)

    def find(self, path: str, method: str) -> RouteMatch | frozenset[str] | None:
        """Return the route; None if the path is unknown, the allowed methods if the method is."""
        methods, params = self._exact.get(path), {}
        if methods is None:
            methods, params = self._match(path)
        if methods is None:
            return None
        route = methods.get("GET" if method == "HEAD" else method)
        return frozenset(methods) if route is None else RouteMatch(route, params)

    def _methods_of(self, path: str) -> dict[str, Route]:
        if "{" not in path:
            return self._exact.setdefault(path, {})
        segments = tuple(path.split("/"))
        group = self._patterns.setdefault(len(segments), [])
        for known, methods in group:
            if known == segments:
                return methods
        group.append((segments, {}))
        return group[-1][1]

    def _match(self, path: str) -> tuple[dict[str, Route] | None, dict[str, str]]:
        given = tuple(path.split("/"))
        for segments, methods in self._patterns.get(len(given), ()):
            if all(s == g or (s[:1] == "{" and g) for s, g in zip(segments, given, strict=True)):
                named = zip(segments, given, strict=True)
                return methods, {s[1:-1]: g for s, g in named if s[:1] == "{"}
        return None, {}

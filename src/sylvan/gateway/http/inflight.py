"""Requests under way by the names that clients gave them, so that they can be aborted."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Protocol

from sylvan.gateway.workers.worker import Worker


class Running(Protocol):
    """A request under way."""

    @property
    def tenant(self) -> str:
        """Whose it is."""
        ...

    @property
    def workers(self) -> Sequence[Worker]:
        """Who serves it now."""
        ...


class Inflight:
    """Who runs under which name. A name may be that of several requests."""

    def __init__(self) -> None:
        self._running: dict[str, list[Running]] = {}

    @contextmanager
    def named(self, name: str | None, running: Running) -> Generator[None]:
        """Within it, a request is under way."""
        if name is None:
            yield
            return
        group = self._running.setdefault(name, [])
        group.append(running)
        try:
            yield
        finally:
            group.remove(running)
            if not group and self._running.get(name) is group:
                del self._running[name]

    def find(self, name: str, tenant: str) -> list[Running]:
        """Requests of that name and tenant."""
        return [running for running in self._running.get(name, ()) if running.tenant == tenant]

"""In-flight requests by client-chosen request ID, so that they can be aborted."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Protocol

from sylvan.gateway.workers.worker import Worker


class Running(Protocol):
    """An in-flight request."""

    @property
    def tenant(self) -> str:
        """Its tenant."""
        ...

    @property
    def workers(self) -> Sequence[Worker]:
        """The workers that serve it now."""
        ...


class Inflight:
    """In-flight requests by ID. Several requests may have the same ID."""

    def __init__(self) -> None:
        self._running: dict[str, list[Running]] = {}

    @contextmanager
    def named(self, name: str | None, running: Running) -> Generator[None]:
        """Register a request while the context is open."""
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
        """Return the requests of a tenant with this ID."""
        return [running for running in self._running.get(name, ()) if running.tenant == tenant]

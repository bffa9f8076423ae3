"""The interface of discovery sources."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

from sylvan.gateway.workers.spec import WorkerSpec


class DiscoveryError(Exception):
    """A source could not list the workers; the known workers stay."""


class WorkerSource(Protocol):
    """Lists the current workers.

    Attributes:
        name: Name in logs and metrics.
    """

    name: ClassVar[str]

    async def list_workers(self) -> Sequence[WorkerSpec] | None:
        """Return all current workers; None if nothing changed since the last call.

        Raises:
            DiscoveryError: The workers cannot be listed now.
        """
        ...

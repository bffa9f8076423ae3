"""What a source of workers is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

from sylvan.gateway.workers.spec import WorkerSpec


class LookError(Exception):
    """A source could not tell which workers there are; those that it told of before stay."""


class WorkerSource(Protocol):
    """Knows which workers there are.

    Attributes:
        name: For logs and metrics.
    """

    name: ClassVar[str]

    async def look(self) -> Sequence[WorkerSpec] | None:
        """All workers that there are now; None if nothing has changed since the last look.

        Raises:
            LookError: That cannot be told now.
        """
        ...

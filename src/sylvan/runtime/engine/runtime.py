"""A running model: the TokenizerManager and the processes or threads behind it."""

from __future__ import annotations

from sylvan.config import Config
from sylvan.runtime.tokenizer.manager import TokenizerManager


class Runtime:
    """What serves one model, seen from the API process; belongs to one asyncio loop.

    Attributes:
        manager: Where requests go in.
    """

    manager: TokenizerManager

    @classmethod
    async def start(cls, config: Config) -> Runtime:
        """Start the processes (or, with `processes: one`, a thread) and wait until all are ready.

        Raises:
            ConfigError: something cannot start; one sentence for the operator.
        """
        raise NotImplementedError

    async def drain(self, deadline_s: float) -> bool:
        """Refuse new requests and wait for the live ones; those left at the deadline are aborted.

        Returns whether all ended by themselves.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """End the processes and remove sockets, shared memory and directory; idempotent."""
        raise NotImplementedError

    def kill(self) -> None:
        """As `close`, at once and without waiting for anything: for a second Ctrl-C."""
        raise NotImplementedError

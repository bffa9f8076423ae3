"""The interface to the KV tiers when KV is transferred through a store."""

from __future__ import annotations

from typing import Protocol

from sylvan.runtime.core.req import Req


class SharedStore(Protocol):
    """A store that both servers use."""

    @property
    def writing(self) -> frozenset[int]:
        """Return the writes in progress."""
        ...

    def prefetch_again(self, req: Req, wait_s: float) -> None:
        """The store has more for a waiting request: look it up again, wait at most this long."""
        ...

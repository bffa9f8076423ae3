"""What handing KV over through a store needs of the tiers."""

from __future__ import annotations

from typing import Protocol

from sylvan.runtime.core.req import Req


class SharedStore(Protocol):
    """A store that both servers have."""

    @property
    def writing(self) -> frozenset[int]:
        """Writes that have not ended."""
        ...

    def look_again(self, req: Req, wait_s: float) -> None:
        """The store has more of a waiting request by now: ask it, and wait so long at most."""
        ...

"""Who owns which stored objects."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from sylvan.gateway.http.caller import Caller
from sylvan.gateway.security.gate import credential


@dataclass(frozen=True, slots=True)
class Owners:
    """Identifies owners by tenant, or by upstream key if clients bring their own.

    Attributes:
        by_key: The gateway has no keys of its own, and forwards those of clients.
    """

    by_key: bool

    def of(self, caller: Caller) -> str:
        """Return the owner of what a client stores."""
        if not self.by_key:
            return f"tenant:{caller.tenant}"
        given = credential(caller.headers) or ""
        return "key:" + hashlib.sha256(given.encode()).hexdigest()

"""Client keys in the gateway; key files have the runtime's format."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence

from sylvan.config.keys import KeyEntry, key_digest
from sylvan.config.values import Secret
from sylvan.gateway.security.principal import Principal
from sylvan.utils.budgets import Budgets
from sylvan.utils.clock import Clock


class Clients:
    """Client keys, and the budgets of their tenants.

    Attributes:
        open: No keys are configured: everyone is a client.
        on_spend: Called with the tenant, and the requests and tokens taken from its budget.
    """

    def __init__(self, key: Secret | None, entries: list[KeyEntry], clock: Clock) -> None:
        self._tenants: dict[bytes, str] = {}
        self._budgets = Budgets(clock)
        self.on_spend: list[Callable[[str, int, int], None]] = []
        self.replace(key, entries)

    def replace(self, key: Secret | None, entries: Sequence[KeyEntry]) -> None:
        """Replace all keys; budgets that stay keep what was spent."""
        found = {} if key is None else {digest(key.reveal()): ""}
        self._tenants = found | {e.sha256.lower().encode(): e.tenant for e in entries}
        self._budgets.replace(
            (e.tenant, e.requests_per_minute, e.tokens_per_minute) for e in entries
        )

    @property
    def open(self) -> bool:
        """Whether everyone is a client."""
        return not self._tenants

    def find(self, presented: str) -> Principal | None:
        """Return the client with this key, in constant time."""
        wanted = digest(presented)
        found: str | None = None
        for known, tenant in self._tenants.items():
            if hmac.compare_digest(known, wanted):
                found = tenant
        return None if found is None else Principal(name=found, tenant=found)

    def admit(self, tenant: str) -> None:
        """Take a request from the tenant's budget.

        Raises:
            CapacityError: The budget is spent.
        """
        self._budgets.admit(tenant)
        self._notify(tenant, 1, 0)

    def charge(self, tenant: str, tokens: int) -> None:
        """Take the tokens of a finished request from the tenant's budget."""
        self._budgets.charge(tenant, tokens)
        self._notify(tenant, 0, tokens)

    def add_remote_usage(self, tenant: str, requests: int, tokens: int) -> None:
        """Apply what another process of this gateway took from a tenant's budget."""
        self._budgets.add_remote_usage(tenant, requests, tokens)

    def _notify(self, tenant: str, requests: int, tokens: int) -> None:
        for listener in self.on_spend:
            listener(tenant, requests, tokens)


def digest(key: str) -> bytes:
    """Return the hash under which a key is stored."""
    return key_digest(key).encode()

"""Client keys of the server; `sylvan.config.keys` defines the format of key files."""

from __future__ import annotations

import hmac
from collections.abc import Iterable

import msgspec

from sylvan.config.keys import KeyEntry, key_digest
from sylvan.config.values import Secret
from sylvan.utils.budgets import Budgets
from sylvan.utils.clock import Clock


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant: the unit of fairness, cache isolation and budgets."""

    name: str = ""
    admin: bool = False


class Keyring:
    """The keys of ordinary clients, stored as hashes, and their tenants' budgets."""

    def __init__(self, keys: Iterable[Secret], entries: Iterable[KeyEntry], clock: Clock) -> None:
        self._entries: list[KeyEntry] = []
        self._budgets = Budgets(clock)
        self.replace(keys, entries)

    def replace(self, keys: Iterable[Secret], entries: Iterable[KeyEntry]) -> None:
        """Replace all keys; budgets that stay keep what was spent."""
        plain = [KeyEntry(sha256=key_digest(key.reveal())) for key in keys]
        self._entries = plain + list(entries)
        self._budgets.replace(
            (entry.tenant, entry.requests_per_minute, entry.tokens_per_minute)
            for entry in self._entries
        )

    @property
    def empty(self) -> bool:
        """Whether no keys are configured."""
        return not self._entries

    @property
    def tenants(self) -> set[str]:
        """Names of all tenants."""
        return {entry.tenant for entry in self._entries if entry.tenant}

    @property
    def adapters(self) -> dict[str, set[str]]:
        """The allowed adapters of each tenant that may not use all."""
        found: dict[str, set[str]] = {}
        for entry in self._entries:
            if entry.adapters is not None:
                found.setdefault(entry.tenant, set()).update(entry.adapters)
        return found

    def find(self, key: str) -> Tenant | None:
        """Return the tenant with a key, in constant time."""
        digest = key_digest(key)
        found: Tenant | None = None
        for entry in self._entries:
            if hmac.compare_digest(digest, entry.sha256.lower()):
                found = Tenant(name=entry.tenant)
        return found

    def admit(self, tenant: Tenant) -> None:
        """Count a request.

        Raises:
            CapacityError: A budget of the tenant is spent (429).
        """
        self._budgets.admit(tenant.name)

    def charge(self, tenant: Tenant, tokens: int) -> None:
        """Count the tokens of a finished request."""
        self._budgets.charge(tenant.name, tokens)

"""API keys: which tenant a key belongs to, and what that tenant may spend.

A key file is JSON: `{"keys": [{"sha256": "<hex of the key>", "tenant": "acme",
"requests_per_minute": 600, "tokens_per_minute": 100000, "adapters": ["legal"]}]}`; the budgets may
be left out, and without `adapters` the tenant may use all LoRA adapters. It holds hashes only, so
that reading it gives nobody access. A budget is above 0; whose key is taken out of the file may do
nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec

from sylvan.config.values import Secret
from sylvan.protocol.errors import CapacityError, ConfigError
from sylvan.utils.clock import Clock

PerMinute = Annotated[float, msgspec.Meta(gt=0)]


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """Who calls: a name for fairness, cache isolation and budgets."""

    name: str = ""
    admin: bool = False


class KeyEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key of a key file."""

    sha256: str
    tenant: str = ""
    requests_per_minute: PerMinute | None = None
    tokens_per_minute: PerMinute | None = None
    adapters: list[str] | None = None


class _KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: list[KeyEntry]


def read_key_file(path: str) -> list[KeyEntry]:
    """Read a key file.

    Raises:
        ConfigError: It cannot be read, or is not of the documented form.
    """
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=_KeyFile).keys
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"The key file {path} cannot be used: {error}") from error


class Budget:
    """A bucket that fills at a steady rate up to one minute's worth, and may run a debt."""

    def __init__(self, per_minute: float, what: str, clock: Clock) -> None:
        self._per_minute = per_minute
        self._what = what
        self._clock = clock
        self._level = per_minute
        self._at = clock()

    def check(self) -> None:
        """Refuse while nothing is left.

        Raises:
            CapacityError: With status 429 and the time until there is something again.
        """
        now = self._clock()
        refill = (now - self._at) * self._per_minute / 60
        self._level = min(self._per_minute, self._level + refill)
        self._at = now
        if self._level < 1:
            message = f"The budget of {self._per_minute:g} {self._what} per minute is used up."
            wait_s = max(1.0, math.ceil((1 - self._level) * 60 / self._per_minute))
            raise CapacityError(message, status=429, retry_after_s=wait_s)

    def spend(self, amount: float) -> None:
        """Take `amount` out, even if that leaves a debt."""
        self._level -= amount


class Keyring:
    """The keys of ordinary clients, as hashes."""

    def __init__(self, keys: Iterable[Secret], entries: Iterable[KeyEntry], clock: Clock) -> None:
        plain = [KeyEntry(sha256=_digest(key.reveal())) for key in keys]
        self._entries = plain + list(entries)
        self._requests: dict[str, Budget] = {}
        self._tokens: dict[str, Budget] = {}
        for entry in self._entries:
            if entry.requests_per_minute:
                budget = Budget(entry.requests_per_minute, "requests", clock)
                self._requests[entry.tenant] = budget
            if entry.tokens_per_minute:
                self._tokens[entry.tenant] = Budget(entry.tokens_per_minute, "tokens", clock)

    @property
    def empty(self) -> bool:
        """Whether no key is configured."""
        return not self._entries

    @property
    def adapters(self) -> dict[str, set[str]]:
        """The adapters that tenants may use, of those that may not use all."""
        found: dict[str, set[str]] = {}
        for entry in self._entries:
            if entry.adapters is not None:
                found.setdefault(entry.tenant, set()).update(entry.adapters)
        return found

    def find(self, key: str) -> Tenant | None:
        """The tenant of `key`; every entry is compared, so that time tells nothing."""
        digest = _digest(key)
        found: Tenant | None = None
        for entry in self._entries:
            if hmac.compare_digest(digest, entry.sha256.lower()):
                found = Tenant(name=entry.tenant)
        return found

    def admit(self, tenant: Tenant) -> None:
        """Count a request.

        Raises:
            CapacityError: With status 429; a budget of the tenant is used up.
        """
        if tokens := self._tokens.get(tenant.name):
            tokens.check()
        if requests := self._requests.get(tenant.name):
            requests.check()
            requests.spend(1)

    def charge(self, tenant: Tenant, tokens: int) -> None:
        """Count the tokens of a finished request."""
        if budget := self._tokens.get(tenant.name):
            budget.spend(tokens)


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()

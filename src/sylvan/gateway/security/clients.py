"""Keys of clients: which tenant a key belongs to, and what that tenant may spend.

The file of keys has the form of the runtime's: `{"keys": [{"sha256": "<hex of the key>", "tenant":
"acme", "requests_per_minute": 600, "tokens_per_minute": 100000}]}`; budgets may be left out.
"""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

import msgspec

from sylvan.config.values import Secret
from sylvan.gateway.errors import QueueFullError
from sylvan.gateway.security.principal import Principal
from sylvan.protocol.errors import ConfigError
from sylvan.utils.clock import Clock


class KeyEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key of a key file."""

    sha256: str
    tenant: str = ""
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None


class _KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: list[KeyEntry]


def read_key_file(path: str) -> list[KeyEntry]:
    """Read a file of keys.

    Raises:
        ConfigError: It cannot be read, or is not of the documented form.
    """
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=_KeyFile).keys
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"server.api_key_file: {path} cannot be used: {error}") from error


class Budget:
    """What may be spent a minute; a bucket that holds one minute's worth, and may run a debt."""

    def __init__(self, per_minute: float, what: str, clock: Clock) -> None:
        self._per_minute = per_minute
        self._what = what
        self._clock = clock
        self._left = per_minute
        self._seen_s = clock()

    def check(self, amount: float) -> None:
        """Refuse if less is left than a request is known to take.

        Raises:
            QueueFullError: With status 429, and when to come back.
        """
        now = self._clock()
        per_s = self._per_minute / 60
        self._left = min(self._per_minute, self._left + (now - self._seen_s) * per_s)
        self._seen_s = now
        if self._left <= 0 or self._left < amount:
            message = f"The budget of {self._per_minute:g} {self._what} a minute is spent."
            raise QueueFullError(message, retry_after_s=max(1.0, (1 - self._left) / per_s))

    def spend(self, amount: float) -> None:
        """Take from it, more than there is if need be."""
        self._left -= amount


class Clients:
    """Keys of clients, and the budgets of their tenants.

    Attributes:
        open: There are no keys: everyone is a client.
    """

    def __init__(self, key: Secret | None, entries: list[KeyEntry], clock: Clock) -> None:
        self._tenants: dict[bytes, str] = {}
        self._requests: dict[str, Budget] = {}
        self._tokens: dict[str, Budget] = {}
        if key is not None:
            self.add(key.reveal(), "")
        for entry in entries:
            self._tenants[entry.sha256.lower().encode()] = entry.tenant
            if entry.requests_per_minute is not None:
                self._requests[entry.tenant] = Budget(entry.requests_per_minute, "requests", clock)
            if entry.tokens_per_minute is not None:
                self._tokens[entry.tenant] = Budget(entry.tokens_per_minute, "tokens", clock)

    @property
    def open(self) -> bool:
        """Whether everyone is a client."""
        return not self._tenants

    def add(self, key: str, tenant: str) -> None:
        """Accept one more key."""
        self._tenants[digest(key)] = tenant

    def find(self, presented: str) -> Principal | None:
        """The client that has this key. Takes as long whatever is presented."""
        wanted = digest(presented)
        found: str | None = None
        for known, tenant in self._tenants.items():
            if hmac.compare_digest(known, wanted):
                found = tenant
        return None if found is None else Principal(name=found, tenant=found)

    def admit(self, tenant: str) -> None:
        """Take a request out of the tenant's budget.

        Raises:
            QueueFullError: It is spent.
        """
        for budgets, amount in ((self._tokens, 0.0), (self._requests, 1.0)):
            budget = budgets.get(tenant)
            if budget is not None:
                budget.check(amount)
                budget.spend(amount)

    def charge(self, tenant: str, tokens: int) -> None:
        """Take the tokens of a finished request out of the tenant's budget."""
        budget = self._tokens.get(tenant)
        if budget is not None:
            budget.spend(tokens)


def digest(key: str) -> bytes:
    """The hash by which a key is kept."""
    return hashlib.sha256(key.encode()).hexdigest().encode()

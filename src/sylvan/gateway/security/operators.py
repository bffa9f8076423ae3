"""Keys of operators: `id:name:role:KEY`, or `id:name:role:sha256=HEX`."""

from __future__ import annotations

import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass

from sylvan.config.values import Secret
from sylvan.gateway.security.clients import digest
from sylvan.gateway.security.principal import Principal, Role
from sylvan.protocol.errors import ConfigError

_HEX = re.compile(r"sha256=([0-9a-fA-F]{64})\Z")


@dataclass(frozen=True, slots=True)
class OperatorKey:
    """One operator key."""

    id: str
    name: str
    role: Role
    digest: bytes

    @classmethod
    def parse(cls, text: str) -> OperatorKey:
        """Parse one key.

        Raises:
            ConfigError: The key is malformed; the message does not contain the key.
        """
        parts = text.split(":", 3)
        if len(parts) != 4 or not all(parts):
            raise ConfigError("control.api_keys: expected id:name:role:KEY")
        key_id, name, role, key = parts
        if role not in ("admin", "user"):
            message = f"control.api_keys: {key_id}: expected admin | user, got {role[:40]!r}"
            raise ConfigError(message)
        hashed = _HEX.match(key)
        value = hashed[1].lower().encode() if hashed else digest(key)
        return cls(key_id, name, role, value)


def operator_keys(keys: Sequence[Secret]) -> Sequence[OperatorKey]:
    """Parse operator keys.

    Raises:
        ConfigError: A key is malformed, or two have the same ID.
    """
    found = [OperatorKey.parse(key.reveal()) for key in keys]
    ids = [key.id for key in found]
    if len(set(ids)) < len(ids):
        raise ConfigError("control.api_keys: two keys have the same id")
    return found


class Operators:
    """The operator keys."""

    def __init__(self, keys: Sequence[Secret]) -> None:
        self._keys = operator_keys(keys)

    def __len__(self) -> int:
        return len(self._keys)

    def replace(self, keys: Sequence[OperatorKey]) -> None:
        """Replace all keys."""
        self._keys = keys

    def find(self, presented: str) -> Principal | None:
        """Return the operator with this key, in constant time."""
        wanted = digest(presented)
        found: OperatorKey | None = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, wanted):
                found = key
        return None if found is None else Principal(found.name, found.role, found.name)

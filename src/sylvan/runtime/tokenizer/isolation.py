"""Isolates the prefix caches of tenants."""

from __future__ import annotations

import hashlib
import hmac
import secrets

import numpy as np

from sylvan.protocol.arrays import IntArray

OWNER_CHARS = 22
MIN_SHARED_TOKENS = 16  # templates begin alike anyway


class CacheIsolation:
    """Unguessable cache salts, derived from a secret of this server and the tenant's name.

    A client who could choose another tenant's salt, or share its cache, could learn its prompts by
    timing (PromptPeek, NDSS 2025). Calls without a tenant share one cache, and prompt prefixes
    that the operator declared public are shared by all.
    """

    def __init__(self, secret: bytes | None = None) -> None:
        self._secret = secret or secrets.token_bytes(32)
        self._public: list[IntArray] = []

    def owner(self, tenant: str) -> str:
        """Return the prefix of a tenant's cache namespaces; empty for calls without a tenant."""
        if not tenant:
            return ""
        digest = hmac.new(self._secret, tenant.encode(), hashlib.sha256)
        return digest.hexdigest()[:OWNER_CHARS] + "/"

    def salt(self, tenant: str, salt: str) -> str:
        """Return the salt for the client's own `salt` within its tenant's cache."""
        if not salt:
            return self.owner(tenant)
        name = hmac.new(self._secret, f"{tenant}\0{salt}".encode(), hashlib.sha256).hexdigest()
        return self.owner(tenant) + name[:OWNER_CHARS]

    def share(self, ids: IntArray) -> None:
        """Declare a prompt prefix public: a system prompt that all tenants share."""
        self._public.append(ids)

    def shared_tokens(self, ids: IntArray) -> int:
        """Return how many leading tokens of a prompt are public; 0 if sharing is not worthwhile."""
        shared = max((_common(public, ids) for public in self._public), default=0)
        return shared if shared >= MIN_SHARED_TOKENS else 0


def _common(public: IntArray, ids: IntArray) -> int:
    count = min(len(public), len(ids))
    differs = np.flatnonzero(public[:count] != ids[:count])
    return int(differs[0]) if len(differs) else count

"""Keeps the prefix caches of tenants apart."""

from __future__ import annotations

import hashlib
import hmac
import secrets

OWNER_CHARS = 22


class CacheIsolation:
    """Salts that nobody can choose: derived from a secret of this server and the tenant's name.

    Whoever could choose another's salt, or share a cache with it, could learn by timing what that
    tenant asked (PromptPeek, NDSS 2025). Calls without a tenant share one cache.
    """

    def __init__(self, secret: bytes | None = None) -> None:
        self._secret = secret or secrets.token_bytes(32)

    def owner(self, tenant: str) -> str:
        """What the cache namespaces of a tenant begin with; empty for the calls without one."""
        if not tenant:
            return ""
        digest = hmac.new(self._secret, tenant.encode(), hashlib.sha256)
        return digest.hexdigest()[:OWNER_CHARS] + "/"

    def salt(self, tenant: str, salt: str) -> str:
        """The salt that stands for the client's own `salt` within its tenant's cache."""
        if not salt:
            return self.owner(tenant)
        name = hmac.new(self._secret, f"{tenant}\0{salt}".encode(), hashlib.sha256).hexdigest()
        return self.owner(tenant) + name[:OWNER_CHARS]

"""Authenticates calls."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

from sylvan.config.route import FrontConfig
from sylvan.gateway.errors import UnauthorizedError
from sylvan.gateway.security.clients import Clients
from sylvan.gateway.security.operators import Operators
from sylvan.gateway.security.principal import Principal


class Tokens(Protocol):
    """Verifies tokens of an identity provider."""

    async def check(self, token: str) -> Principal | None:
        """Return the principal of a token; None if it is invalid."""
        ...


@dataclass(frozen=True, slots=True)
class GatewayAuth:
    """Decides who may call.

    Clients: holders of a client or operator key; everyone, if there are no client keys.
    Operators: holders of the role `admin` by key or token. Without operator keys or tokens, the
    gateway's own key opens these routes; without any key, local programs are operators of a
    gateway that listens on loopback only.

    Attributes:
        front: Where the gateway listens, and which pages may call it.
        clients: Client keys.
        operators: Operator keys.
        tokens: Verifies operator tokens, if enabled.
    """

    front: FrontConfig
    clients: Clients
    operators: Operators
    tokens: Tokens | None = None

    async def client(self, headers: Mapping[str, str]) -> Principal:
        """Authenticate a client.

        Raises:
            UnauthorizedError: The credentials are not known.
        """
        if self.clients.open:
            return Principal()
        presented = credential(headers)
        if presented is None:
            raise UnauthorizedError("Unauthorized: an API key is needed.")
        found = self.clients.find(presented) or self.operators.find(presented)
        if found is None:
            raise UnauthorizedError("Unauthorized: this API key is not known.")
        return found

    async def operator(self, headers: Mapping[str, str]) -> Principal:
        """Authenticate an operator.

        Raises:
            UnauthorizedError: The credentials are not known, or not an operator's.
            CapacityError: The credentials cannot be checked now.
        """
        presented = credential(headers)
        if not self.operators and self.tokens is None:
            return self._only_key(presented, headers)
        if presented is None:
            raise UnauthorizedError("Unauthorized: a key or token of an operator is needed.")
        found = self.operators.find(presented)
        if found is None and self.tokens is not None:
            found = await self.tokens.check(presented)
        if found is None:
            raise UnauthorizedError("Unauthorized: this key or token is not known.")
        if found.role != "admin":
            message = f"Forbidden: {found.name} has the role {found.role}; this route needs admin."
            raise UnauthorizedError(message, status=403)
        return found

    def _only_key(self, presented: str | None, headers: Mapping[str, str]) -> Principal:
        if self.clients.open:
            if is_loopback(self.front) and self._from_here(headers):
                return Principal("local", "admin")
            message = (
                "Forbidden: without keys, only programs on this machine may operate the gateway."
            )
            raise UnauthorizedError(message, status=403)
        found = self.clients.find(presented) if presented is not None else None
        if found is None:
            raise UnauthorizedError("Unauthorized: an API key is needed.")
        if found.tenant:
            raise UnauthorizedError(
                "Forbidden: this route is for operators, not for tenants.", status=403
            )
        return Principal("key", "admin")

    def _from_here(self, headers: Mapping[str, str]) -> bool:
        """Whether the call does not come from a web page of another origin in a local browser."""
        origin = headers.get("origin")
        if origin is not None and origin not in self.front.cors_origins:
            return _is_local_name(origin.partition("://")[2])
        return _is_local_name(headers.get("host", "localhost"))


def credential(headers: Mapping[str, str]) -> str | None:
    """Read `Authorization: Bearer KEY`, or `x-api-key: KEY` as Anthropic's clients send it."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key") or None


def is_loopback(front: FrontConfig) -> bool:
    """Whether only local programs can connect."""
    if front.uds is not None or front.host == "localhost":
        return True
    try:
        return ipaddress.ip_address(front.host).is_loopback
    except ValueError:
        return False


def _is_local_name(host_port: str) -> bool:
    try:
        name = urlsplit(f"//{host_port}").hostname or ""
    except ValueError:
        return False
    return name in ("localhost", "::1", "") or name.startswith("127.")

"""Checks the credentials of a call."""

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
    """Accepts tokens of an identity provider."""

    async def check(self, token: str) -> Principal | None:
        """Who has this token; None if it is none of ours."""
        ...


@dataclass(frozen=True, slots=True)
class GatewayAuth:
    """Who is let through.

    Clients: who has a key of a client or operator; everyone, where there are no keys of clients.
    Operators: who has the role `admin` by key or token. Where neither keys nor tokens of operators
    are configured, the one key of the gateway opens these routes too; and where there is no key at
    all, programs of this machine may steer a gateway that listens to this machine only.

    Attributes:
        front: Where the gateway listens, and which pages may call it.
        clients: Keys of clients.
        operators: Keys of operators.
        tokens: Of operators, if any are accepted.
    """

    front: FrontConfig
    clients: Clients
    operators: Operators
    tokens: Tokens | None = None

    async def client(self, headers: Mapping[str, str]) -> Principal:
        """Who wants a request served.

        Raises:
            UnauthorizedError: Nobody we know.
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
        """Who wants to steer the gateway.

        Raises:
            UnauthorizedError: Nobody who may.
            CapacityError: That cannot be found out now.
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
            message = f"Forbidden: {found.name} has the role {found.role}; this needs admin."
            raise UnauthorizedError(message, status=403)
        return found

    def _only_key(self, presented: str | None, headers: Mapping[str, str]) -> Principal:
        if self.clients.open:
            if is_loopback(self.front) and self._from_here(headers):
                return Principal("local", "admin")
            message = "Forbidden: without keys only programs of this machine may steer the gateway."
            raise UnauthorizedError(message, status=403)
        found = self.clients.find(presented) if presented is not None else None
        if found is None:
            raise UnauthorizedError("Unauthorized: an API key is needed.")
        if found.tenant:
            raise UnauthorizedError("Forbidden: this is not for tenants.", status=403)
        return Principal("key", "admin")

    def _from_here(self, headers: Mapping[str, str]) -> bool:
        """Not from a page that a browser of this machine has loaded from elsewhere."""
        origin = headers.get("origin")
        if origin is not None and origin not in self.front.cors_origins:
            return _is_local_name(origin.partition("://")[2])
        return _is_local_name(headers.get("host", "localhost"))


def credential(headers: Mapping[str, str]) -> str | None:
    """`Authorization: Bearer KEY`, or `x-api-key: KEY` as Anthropic's clients send it."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key") or None


def is_loopback(front: FrontConfig) -> bool:
    """Whether only programs of this machine can connect."""
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

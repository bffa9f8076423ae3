"""Authentication: who may call which route."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from starlette.datastructures import Headers

from sylvan.config.values import Secret
from sylvan.runtime.server.browsers import ANY, is_cross_origin
from sylvan.runtime.server.keyring import Keyring, Tenant
from sylvan.runtime.server.settings import CurrentSettings


class Level(Enum):
    """The access level of a route."""

    OPEN = "open"  # everyone: liveness, metrics, static pages
    NORMAL = "normal"  # clients: an API key, if any is configured
    OWN_OR_ADMIN = "own_or_admin"  # like ADMIN_OPTIONAL; also tenants, for their own objects
    ADMIN_OPTIONAL = "admin_optional"  # operators; also clients if no admin key is configured
    ADMIN_FORCE = "admin_force"  # operators only


@dataclass(frozen=True, slots=True)
class CallRefusal:
    """Why a call was rejected."""

    status: int
    message: str


class Gate:
    """Authenticates calls, in constant time."""

    def __init__(self, settings: CurrentSettings, keyring: Keyring) -> None:
        self._settings = settings
        self._keyring = keyring
        self._loopback = settings.now.loopback
        self._origins = settings.now.server.cors_origins

    @property
    def _admin(self) -> Secret | None:
        return self._settings.now.server.admin_api_key

    def check(
        self, level: Level, headers: Headers, *, simple: bool = False
    ) -> Tenant | CallRefusal:
        """Return the tenant, or why the call is rejected.

        Args:
            level: Access level of the route.
            headers: Headers of the call.
            simple: A GET that changes state, which a link or image of any page could trigger.
        """
        if level is Level.OPEN:
            return Tenant()
        presented = _credential(headers)
        if level is Level.NORMAL:
            return self._check_client(presented, headers, simple=simple)
        if level is Level.OWN_OR_ADMIN:
            tenant = self._keyring.find(presented) if presented is not None else None
            if tenant is not None and tenant.name:
                return tenant
            level = Level.ADMIN_OPTIONAL
        return self._check_operator(level, presented, headers, simple=simple)

    def _check_operator(
        self, level: Level, presented: str | None, headers: Headers, *, simple: bool
    ) -> Tenant | CallRefusal:
        if self._admin:
            good = presented is not None and self._admin.matches(presented)
            return Tenant(admin=True) if good else _refusal(presented)
        if level is Level.ADMIN_OPTIONAL and not self._keyring.empty:
            found = self._check_client(presented, headers, simple=simple)
            # the only key of a server is the operator's; tenants have keys of their own
            is_tenant = isinstance(found, Tenant) and bool(found.name)
            return CallRefusal(403, "Forbidden") if is_tenant else found
        # Without any key, only local programs may operate the server: not other
        # machines, and not web pages loaded in a local browser.
        if level is not Level.ADMIN_OPTIONAL or not self._loopback:
            return CallRefusal(403, "Forbidden")
        return self._of_a_page(headers, simple=simple) or Tenant(admin=True)

    def _of_a_page(self, headers: Headers, *, simple: bool) -> CallRefusal | None:
        """Reject a call without credentials if a web page may have made it."""
        if is_cross_origin(headers, self._origins):
            return CallRefusal(
                403, "Forbidden: pages of other origins may not call (cors_origins)."
            )
        if simple:
            return CallRefusal(403, "Forbidden: without a key this route takes POST only.")
        return None

    def _check_client(
        self, presented: str | None, headers: Headers, *, simple: bool
    ) -> Tenant | CallRefusal:
        if self._keyring.empty:
            asked_for = ANY in self._origins and not simple
            return (None if asked_for else self._of_a_page(headers, simple=simple)) or Tenant()
        if presented is None:
            return CallRefusal(401, "Unauthorized")
        tenant = self._keyring.find(presented)
        if tenant is None and self._admin and self._admin.matches(presented):
            tenant = Tenant(admin=True)
        return tenant or CallRefusal(401, "Unauthorized")


def _credential(headers: Headers) -> str | None:
    """Read `Authorization: Bearer KEY`, or `x-api-key: KEY` as Anthropic's clients send it."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key") or None


def _refusal(presented: str | None) -> CallRefusal:
    return CallRefusal(401, "Unauthorized") if presented is None else CallRefusal(403, "Forbidden")

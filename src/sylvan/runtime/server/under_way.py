"""How many calls a tenant has under way: streams count until they have ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sylvan.protocol.errors import CapacityError
from sylvan.runtime.server.keyring import Tenant


class TenantCalls:
    """The calls of tenants; those of nameless keys are not told apart, and not bounded.

    Args:
        most: Calls of one tenant at a time.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._calls: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._calls.total()

    def begin(self, tenant: Tenant) -> Callable[[], None]:
        """Count a call in; to be told when it is over, once.

        Raises:
            CapacityError: With status 429; the tenant has too many of them.
        """
        name = tenant.name
        if not name:
            return _nothing
        if self._calls[name] >= self._most:
            raise CapacityError(
                f"{self._most} calls of this key's tenant are under way (limits.calls_per_tenant).",
                status=429,
                setting="limits.calls_per_tenant",
            )
        self._calls[name] += 1
        return lambda: self._end(name)

    def _end(self, name: str) -> None:
        self._calls[name] -= 1
        if not self._calls[name]:
            del self._calls[name]


class Counted(Response):
    """A response that tells when it has been sent, or cannot be any more."""

    def __init__(self, response: Response, end: Callable[[], None]) -> None:
        # as Starlette looks at it: what is sent is the other one
        self.status_code, self.raw_headers = response.status_code, response.raw_headers
        self._response = response
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run as ASGI application."""
        try:
            await self._response(scope, receive, send)
        finally:
            self._end()


def _nothing() -> None:
    pass

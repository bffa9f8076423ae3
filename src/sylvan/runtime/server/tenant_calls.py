"""Counts each tenant's calls in flight; streams count until they end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sylvan.protocol.errors import CapacityError
from sylvan.runtime.server.keyring import Tenant


class TenantCalls:
    """The calls in flight of tenants; holders of unnamed keys are not counted or limited.

    Args:
        limit: Concurrent calls per tenant.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._calls: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._calls.total()

    def begin(self, tenant: Tenant) -> Callable[[], None] | None:
        """Count a call; return the function to call once when it ends; None: it is not counted.

        Raises:
            CapacityError: The tenant has too many calls in flight (429).
        """
        name = tenant.name
        if not name:
            return None
        if self._calls[name] >= self._limit:
            raise CapacityError(
                f"{self._limit} calls of this key's tenant are in flight "
                "(limits.calls_per_tenant).",
                status=429,
                setting="limits.calls_per_tenant",
            )
        self._calls[name] += 1
        return lambda: self._end(name)

    def _end(self, name: str) -> None:
        self._calls[name] -= 1
        if not self._calls[name]:
            del self._calls[name]


class CountedResponse(Response):
    """A response that reports when it was sent or can no longer be sent."""

    def __init__(self, response: Response, end: Callable[[], None]) -> None:
        # Starlette checks this; the wrapped response is the one that is sent
        self.status_code, self.raw_headers = response.status_code, response.raw_headers
        self._response = response
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run as ASGI application."""
        try:
            await self._response(scope, receive, send)
        finally:
            self._end()

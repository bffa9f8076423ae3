"""Per-minute budgets of tenants."""

from __future__ import annotations

import math
from collections.abc import Iterable

from sylvan.protocol.errors import CapacityError
from sylvan.utils.clock import Clock


class TokenBucket:
    """A token bucket: refills at a steady rate up to one minute's amount; may go into debt.

    Attributes:
        per_minute: Its capacity, and what it regains per minute.
    """

    def __init__(self, per_minute: float, what: str, clock: Clock) -> None:
        self.per_minute = per_minute
        self._what = what
        self._clock = clock
        self._level = per_minute
        self._at = clock()

    def check(self) -> None:
        """Check that something is left.

        Raises:
            CapacityError: The bucket is empty: status 429, with the time until it refills.
        """
        now = self._clock()
        refill = (now - self._at) * self.per_minute / 60
        self._level = min(self.per_minute, self._level + refill)
        self._at = now
        if self._level < 1:
            message = f"The budget of {self.per_minute:g} {self._what} per minute is used up."
            wait_s = max(1.0, math.ceil((1 - self._level) * 60 / self.per_minute))
            raise CapacityError(message, status=429, retry_after_s=wait_s)

    def spend(self, amount: float) -> None:
        """Take out `amount`, even if that leaves a debt."""
        self._level -= amount


class Budgets:
    """Budgets of requests and tokens of each tenant; a tenant without a budget is not limited."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._requests: dict[str, TokenBucket] = {}
        self._tokens: dict[str, TokenBucket] = {}

    def add(self, tenant: str, requests: float | None, tokens: float | None) -> None:
        """Limit a tenant to that many requests and tokens a minute; None: no limit."""
        if requests is not None:
            self._requests[tenant] = TokenBucket(requests, "requests", self._clock)
        if tokens is not None:
            self._tokens[tenant] = TokenBucket(tokens, "tokens", self._clock)

    def replace(self, limits: Iterable[tuple[str, float | None, float | None]]) -> None:
        """Replace all limits, given as for `add`; remaining tenants keep what they have spent.

        The last limit of a tenant wins.
        """
        old = self._requests, self._tokens
        self._requests, self._tokens = {}, {}
        for tenant, requests, tokens in limits:
            self.add(tenant, requests, tokens)
        for before, after in zip(old, (self._requests, self._tokens), strict=True):
            for tenant, budget in before.items():
                if tenant in after and after[tenant].per_minute == budget.per_minute:
                    after[tenant] = budget

    def admit(self, tenant: str) -> None:
        """Count a request.

        Raises:
            CapacityError: A budget of the tenant is used up (status 429).
        """
        if tokens := self._tokens.get(tenant):
            tokens.check()
        if requests := self._requests.get(tenant):
            requests.check()
            requests.spend(1)

    def charge(self, tenant: str, tokens: int) -> None:
        """Count the tokens of a finished request."""
        if budget := self._tokens.get(tenant):
            budget.spend(tokens)

    def add_remote_usage(self, tenant: str, requests: int, tokens: int) -> None:
        """Count what a tenant used of its budget in another process."""
        for budgets, amount in ((self._requests, requests), (self._tokens, tokens)):
            if budget := budgets.get(tenant):
                budget.spend(amount)

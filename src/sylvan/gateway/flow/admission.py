"""Admission control: which requests run now, which wait, which are rejected."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict, deque
from dataclasses import dataclass

from sylvan.config.route import RouteLimitsConfig
from sylvan.gateway.errors import QueueFullError, QueueTimeoutError
from sylvan.utils.clock import Clock


class Permit:
    """One admitted request. Its owner closes it after the last byte of the answer was sent."""

    __slots__ = ("_admission", "_open")

    def __init__(self, admission: GatewayAdmission) -> None:
        self._admission = admission
        self._open = True

    def close(self) -> None:
        """Release the slot; closing again has no effect."""
        if self._open:
            self._open = False
            self._admission.left()


@dataclass(eq=False, slots=True)
class _Waiter:
    tenant: str
    future: asyncio.Future[Permit]


class GatewayAdmission:
    """Limits concurrent requests and requests per second; the rest wait in a bounded, fair queue.

    Tenants are served round-robin, so a tenant with many queued requests only delays itself. When
    the queue is full, a new request replaces the newest request of the tenant with the most
    queued requests, unless that tenant sent it. No tenant can fill the queue for others.

    Attributes:
        num_inside: Admitted requests that have not finished.
        num_waiting: Queued requests.
    """

    def __init__(self, config: RouteLimitsConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._queues: OrderedDict[str, deque[_Waiter]] = OrderedDict()  # next tenant first
        self._rate = _Rate(config, clock) if config.rate_per_s else None
        self._timer: asyncio.TimerHandle | None = None
        self.num_inside = 0
        self.num_waiting = 0

    def change(self, config: RouteLimitsConfig) -> None:
        """Set new limits; admitted requests stay."""
        if config.rate_per_s != self._config.rate_per_s:
            self._rate = _Rate(config, self._clock) if config.rate_per_s else None
        self._config = config
        self._serve()

    async def enter(self, tenant: str = "") -> Permit:
        """Wait until a request is admitted.

        Raises:
            QueueFullError: Too many requests are queued.
            QueueTimeoutError: The request was queued too long.
        """
        if not self.num_waiting and self._may_enter():
            return self._let_in()
        waiter = self._line_up(tenant)
        try:
            async with asyncio.timeout(self._config.queue_timeout_s):
                return await waiter.future
        except TimeoutError:
            _give_back(waiter)
            seconds = self._config.queue_timeout_s
            raise QueueTimeoutError(f"The request waited {seconds:g} s for its turn.") from None
        except asyncio.CancelledError:
            _give_back(waiter)
            raise
        finally:
            self._forget(waiter)

    def left(self) -> None:
        """Count a finished request, and admit the next."""
        self.num_inside -= 1
        self._serve()

    def _may_enter(self) -> bool:
        most = self._config.max_concurrent
        if most is not None and self.num_inside >= most:
            return False
        return self._rate is None or self._rate.delay_s() == 0.0

    def _let_in(self) -> Permit:
        self.num_inside += 1
        if self._rate is not None:
            self._rate.take()
        return Permit(self)

    def _line_up(self, tenant: str) -> _Waiter:
        if self.num_waiting >= self._config.queue_size:
            self._make_room(tenant)
        waiter = _Waiter(tenant, asyncio.get_running_loop().create_future())
        self._queues.setdefault(tenant, deque()).append(waiter)
        self.num_waiting += 1
        self._plan()
        return waiter

    def _make_room(self, tenant: str) -> None:
        """Reject the newest queued request of the tenant with the most queued requests.

        Raises:
            QueueFullError: The newcomer's tenant is that one.
        """
        error = QueueFullError(
            f"{self.num_inside} requests are running and {self.num_waiting} are queued; "
            "try again later."
        )
        mine = len(self._queues.get(tenant, ()))
        longest = max(self._queues.values(), key=len, default=deque[_Waiter]())
        if len(longest) <= mine + 1:
            raise error
        victim = longest[-1]
        self._forget(victim)
        victim.future.set_exception(error)

    def _serve(self) -> None:
        """Admit as many requests as the limits allow, one per tenant in turn."""
        while self._queues and self._may_enter():
            tenant, queue = next(iter(self._queues.items()))
            waiter = queue[0]
            self._forget(waiter)
            if tenant in self._queues:
                self._queues.move_to_end(tenant)
            if not waiter.future.done():
                waiter.future.set_result(self._let_in())
        self._plan()

    def _plan(self) -> None:
        """Schedule the next admission for when the rate allows it."""
        if self._rate is None or not self._queues or self._timer is not None:
            return
        delay_s = self._rate.delay_s()
        if delay_s:
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._serve()

    def _forget(self, waiter: _Waiter) -> None:
        queue = self._queues.get(waiter.tenant)
        if queue is not None and waiter in queue:
            queue.remove(waiter)
            self.num_waiting -= 1
            if not queue:
                del self._queues[waiter.tenant]


def _give_back(waiter: _Waiter) -> None:
    """Close a permit that was granted after its waiter gave up."""
    future = waiter.future
    if future.done() and not future.cancelled() and future.exception() is None:
        future.result().close()


class _Rate:
    """A token bucket that fills at a steady rate."""

    def __init__(self, config: RouteLimitsConfig, clock: Clock) -> None:
        assert config.rate_per_s is not None
        self._per_s = config.rate_per_s
        self._most = float(config.max_concurrent or max(1, math.ceil(config.rate_per_s)))
        self._clock = clock
        self._left = self._most
        self._seen_s = clock()

    def delay_s(self) -> float:
        """Seconds until a token is available."""
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._seen_s) * self._per_s)
        self._seen_s = now
        return max(0.0, (1.0 - self._left) / self._per_s)

    def take(self) -> None:
        """Take one token."""
        self._left -= 1.0

"""Fair sharing between tenants by virtual token counters (VTC, arXiv:2401.00588)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sylvan.runtime.core.req import Batch, Req
from sylvan.runtime.sched.capability import Capability
from sylvan.runtime.sched.policies.api import WINDOW, PolicyContext, SchedulePolicy

OUTPUT_WEIGHT = 2.0  # an output token costs as much as two prompt tokens (the paper's choice)


class VirtualTokenCounter(Capability):
    """The tenant with the least weighted service goes first.

    A tenant pays for computed tokens; tokens from the prefix cache are free. A tenant that was idle
    starts level with the least served active one, so idling earns no credit. While two tenants both
    have requests waiting, their weighted charges differ by at most twice the cost of the largest
    request or, where many run at once, of the tokens these hold: the paper's 2 max(w_p L_input, w_q
    M).
    """

    def __init__(self, context: PolicyContext) -> None:
        self._weights = context.tenant_weights
        self._cached_tokens = context.cached_tokens
        self._served: dict[str, float] = {}
        self._waiting: set[str] = set()  # tenants that had waiting requests at the last call

    def order(self, waiting: Sequence[Req]) -> Sequence[Req]:
        queues: dict[str, list[Req]] = {}
        for req in reversed(waiting):
            queues.setdefault(req.request.tenant, []).append(req)
        self._level(queues)
        counters = {tenant: self._served[tenant] for tenant in queues}
        ordered: list[Req] = []
        while queues:
            tenant = min(counters, key=lambda t: (counters[t], t))
            req = queues[tenant].pop()
            cached = self._cached_tokens(req) if len(ordered) < WINDOW else 0
            ordered.append(req)
            counters[tenant] += self._price(tenant, req.prompt_len - cached)
            if not queues[tenant]:
                del queues[tenant], counters[tenant]
        return ordered

    def on_batch(self, batch: Batch) -> None:
        """Charge the tenants for the tokens of this step."""
        for piece in batch.slices:
            tenant = piece.req.request.tenant
            prompt = max(0, min(piece.stop, piece.req.prompt_len) - piece.start)
            cost = prompt + OUTPUT_WEIGHT * piece.samples
            self._served[tenant] = self._served.get(tenant, 0.0) + self._price(tenant, cost)

    def served(self, tenant: str) -> float:
        """Return the weighted service of a tenant so far."""
        return self._served.get(tenant, 0.0)

    def _level(self, queues: Mapping[str, Sequence[Req]]) -> None:
        busy = [self._served[t] for t in queues if t in self._waiting]
        floor = min(busy, default=min(self._served.values(), default=0.0))
        for tenant in queues.keys() - self._waiting:
            self._served[tenant] = max(self._served.get(tenant, 0.0), floor)
        self._waiting = set(queues)

    def _price(self, tenant: str, cost: float) -> float:
        return cost / self._weights.get(tenant, 1.0)


def build(context: PolicyContext) -> SchedulePolicy:
    return VirtualTokenCounter(context)

"""Finds objects that one worker stores: responses, files, batches, sessions."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Sequence

from sylvan.api.errors import Family
from sylvan.gateway.errors import NoWorkerError, UpstreamError
from sylvan.gateway.flow.retry import RETRYABLE
from sylvan.gateway.http.answer import Answer
from sylvan.gateway.http.caller import Caller, Refusal
from sylvan.gateway.http.exchange import ExchangeParts
from sylvan.gateway.http.outgoing import AnswerJournal, new_ticket
from sylvan.gateway.http.relay import Relay, RetryableStatusError
from sylvan.gateway.http.routes import ProxyRoute
from sylvan.gateway.observe.meter import RequestMeter, RouteLabels
from sylvan.gateway.workers.worker import Worker
from sylvan.protocol.errors import RequestError
from sylvan.protocol.journal import Totals

MAX_REMEMBERED = 65536
_NOT_HERE = frozenset({404})


class ObjectLocator:
    """Finds the worker that stores an object.

    Objects that are listed per tenant (files, batches, sessions) are stored by the worker to which
    the tenant hashes on the ring. Objects with unique IDs are searched for, and their worker is
    remembered.
    """

    def __init__(self, parts: ExchangeParts) -> None:
        self._parts = parts
        self._known: OrderedDict[str, str] = OrderedDict()

    async def serve(self, caller: Caller, route: ProxyRoute, raw: bytes) -> None:
        """Forward a request to the worker that stores its object.

        Raises:
            NoWorkerError: There is no worker to ask.
            RequestError: Workers cannot distinguish tenants.
        """
        if route.spread == "tenant":
            workers: Sequence[Worker] = [self.keeper(caller.tenant)]
        else:
            workers = self._order(caller.path)
        refusal: Refusal | None = None
        for worker in workers:
            self._check_tenant(caller, worker)
            try:
                await self._ask(caller, route.family, worker, raw)
            except RetryableStatusError as error:
                refusal = error.refusal
            except UpstreamError as error:
                if len(workers) == 1:
                    raise
                self._parts.health.suspect(worker)
                refusal = refusal or Refusal(error.status, (), str(error).encode())
            else:
                self._remember(caller.path, worker)
                return
        if refusal is None:
            raise NoWorkerError("There is no worker to ask.")
        await Answer(caller, route.family, self._parts.limits.slow_client_s).refuse(refusal)

    def keeper(self, tenant: str) -> Worker:
        """Return the worker that stores a tenant's objects.

        Raises:
            NoWorkerError: No worker is available.
        """
        for worker_id in self._parts.registry.ring.walk(f"tenant {tenant}".encode()):
            worker = self._parts.registry.get(worker_id)
            if worker is not None and worker.available and worker.connection == "http":
                return worker
        raise NoWorkerError("No worker is available.")

    async def find(self, caller: Caller, path: str) -> Worker | None:
        """Return the worker at which a GET of `path` succeeds."""
        for worker in self._order(path):
            probe = caller.for_call("GET", path)
            try:
                await self._ask(probe, Family.NATIVE, worker, b"")
            except UpstreamError:
                continue
            self._remember(path, worker)
            return worker
        return None

    async def send(self, caller: Caller, path: str, worker: Worker, body: bytes) -> None:
        """Send a client's command to a worker; ignore whether it succeeded."""
        other = caller.for_call("POST", path)
        with contextlib.suppress(UpstreamError):
            await self._ask(other, Family.NATIVE, worker, body)

    def _order(self, path: str) -> Sequence[Worker]:
        """Return the workers to ask, the one known to store the object first."""
        workers = [
            worker
            for worker in self._parts.registry.workers
            if worker.is_healthy and worker.connection == "http" and worker.dp_rank in (None, 0)
        ]
        known = self._known.get(_object_path(path))
        return sorted(workers, key=lambda worker: worker.id != known)

    def _remember(self, path: str, worker: Worker) -> None:
        self._known[_object_path(path)] = worker.id
        self._known.move_to_end(_object_path(path))
        if len(self._known) > MAX_REMEMBERED:
            self._known.popitem(last=False)

    def _check_tenant(self, caller: Caller, worker: Worker) -> None:
        if caller.tenant and not worker.found.journals:
            message = "The workers cannot distinguish the tenants of this gateway."
            raise RequestError(message, status=501)

    async def _ask(self, caller: Caller, family: Family, worker: Worker, raw: bytes) -> None:
        parts = self._parts
        labels = RouteLabels("http", "regular", "http", "unknown", _shape(caller.path))
        meter = RequestMeter(parts.metrics, labels, parts.clock, stream=False)
        answer = Answer(caller, family, parts.limits.slow_client_s)
        dispatch = worker.begin()
        relay = Relay(answer, dispatch, meter, RETRYABLE | _NOT_HERE)
        journal = AnswerJournal(new_ticket(caller, parts.wall()), max_bytes=0)
        headers = parts.sender.forwarding.headers(caller)
        request = parts.sender.outgoing(caller, headers, worker, raw)
        try:
            await parts.sender.send(request, worker, journal, relay, 0.0)
            dispatch.succeeded()
        finally:
            dispatch.close()
            meter.done(Totals())


def _object_path(path: str) -> str:
    """`/v1/batches/batch_1` for `/v1/batches/batch_1/cancel`."""
    depth = 5 if path.startswith("/v1/messages/batches/") else 4
    return "/".join(path.split("/")[:depth])


def _shape(path: str) -> str:
    """Return a path without client-chosen names."""
    return "/".join(path.split("/")[:3])

"""Sends administrative commands to all workers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from sylvan.gateway.errors import NoWorkerError, UpstreamError
from sylvan.gateway.http.caller import Caller
from sylvan.gateway.http.exchange import ExchangeParts
from sylvan.gateway.http.routes import ProxyRoute
from sylvan.gateway.workers.worker import Worker

TIMEOUT_S = 620.0
"""Longer than any of these commands may wait for running requests, in seconds."""
MAX_SHOWN_BYTES = 4096


_CLIENTS_FAULTS = frozenset({400, 404, 409, 413, 415, 422})


class FanOut:
    """Sends a command to every worker, and reports each answer."""

    def __init__(self, parts: ExchangeParts) -> None:
        self._parts = parts

    async def serve(self, caller: Caller, route: ProxyRoute, raw: bytes) -> None:
        """Send the command, and answer with all results: 200, 207 if some failed, 502 if all did.

        If all workers reject it for the same reason, the call is at fault: answer their status.

        Raises:
            NoWorkerError: There are no workers.
        """
        workers = servers(self._parts.registry.workers)
        if not workers:
            raise NoWorkerError("There is no worker.")
        outcomes = await asyncio.gather(*(self._ask(caller, worker, raw) for worker in workers))
        good = sum(outcome["status"] == 200 for outcome in outcomes)
        word = "success" if good == len(outcomes) else "partial_success" if good else "failed"
        refused = {outcome["status"] for outcome in outcomes}
        failed = refused.pop() if len(refused) == 1 and refused < _CLIENTS_FAULTS else 502
        status = 200 if good == len(outcomes) else 207 if good else failed
        content: Mapping[str, Any] = {
            "status": word,
            "success": good == len(outcomes),
            "message": f"{good} of {len(outcomes)} workers carried out the command.",
            "workers": outcomes,
        }
        await caller.reply_json(content, status)

    async def _ask(self, caller: Caller, worker: Worker, raw: bytes) -> dict[str, Any]:
        sender = self._parts.sender
        request = sender.outgoing(caller, sender.forwarding.headers(caller), worker, raw)
        try:
            answer = await sender.upstream.call(request, TIMEOUT_S)
        except UpstreamError as error:
            return {"url": worker.url, "status": error.status, "answer": str(error)}
        return {"url": worker.url, "status": answer.status, "answer": _shown(answer.body)}


def servers(workers: Sequence[Worker]) -> list[Worker]:
    """Return one worker per HTTP server: the ranks of one server share its HTTP port."""
    return [w for w in workers if w.connection == "http" and w.dp_rank in (None, 0)]


def _shown(body: bytes) -> Any:
    """Return an answer as a JSON value, or else as text."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return body[:MAX_SHOWN_BYTES].decode(errors="replace").strip()

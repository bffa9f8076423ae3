"""Routes that report the state of the gateway and its workers, and the models they serve."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from sylvan.api.errors import Family
from sylvan.api.version import VERSION
from sylvan.gateway.control.api import METRICS, TEXT, Handler, Level, OwnRoute, Params
from sylvan.gateway.control.merged import merged
from sylvan.gateway.control.views import worker_view
from sylvan.gateway.errors import NoWorkerError
from sylvan.gateway.http.caller import Caller
from sylvan.gateway.http.fanout import servers
from sylvan.gateway.workers.probe import HttpProbe
from sylvan.gateway.workers.registry import Registry
from sylvan.gateway.workers.worker import Worker
from sylvan.protocol.errors import RequestError
from sylvan.utils.clock import Clock

ASK_S = 5.0
GENERATE_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class InformationParts:
    """Dependencies of these routes.

    Attributes:
        registry: All workers.
        probe: Asks workers for information.
        draining: Whether the gateway is stopping.
        wall: Wall clock, in seconds since the Unix epoch.
        started: When the gateway started.
        shown: Settings of the gateway, without secrets.
    """

    registry: Registry
    probe: HttpProbe
    draining: Callable[[], bool]
    wall: Clock
    started: float
    shown: Mapping[str, Any]


class Information:
    """The informational routes."""

    def __init__(self, parts: InformationParts) -> None:
        self._parts = parts

    @property
    def routes(self) -> tuple[OwnRoute, ...]:
        """Return the routes."""
        return (
            *self._all("open", self.live, "/liveness", "/live", "/health", "/ping"),
            *self._all("open", self.ready, "/readiness", "/ready"),
            *self._all("open", self.generates, "/health_generate"),
            OwnRoute(path="/v1/models", handler=self.models, family=Family.OPENAI),
            OwnRoute(path="/v1/models/{id}", handler=self.model, family=Family.OPENAI),
            OwnRoute(path="/api/tags", handler=self.tags, family=Family.OLLAMA),
            OwnRoute(path="/api/ps", handler=self.tags, family=Family.OLLAMA),
            *self._all("client", self.model_info, "/model_info", "/get_model_info"),
            *self._all("operator", self.server_info, "/server_info", "/get_server_info"),
            *self._all("client", self.loads, "/v1/loads"),
            *self._all("client", self.get_loads, "/get_loads"),
            *self._all("open", self.engine_metrics, "/engine_metrics"),
        )

    async def live(self, caller: Caller, params: Params) -> None:
        """Answer 200 while the event loop runs."""
        await caller.reply(200, TEXT, b"OK")

    async def ready(self, caller: Caller, params: Params) -> None:
        """Answer 200 while the gateway accepts requests and a worker can serve them."""
        workers = self._parts.registry.workers
        able = [worker for worker in workers if worker.available]
        ready = bool(able) and not self._parts.draining()
        if self._parts.registry.has("prefill") or self._parts.registry.has("decode"):
            kinds = {worker.kind for worker in able}
            ready = ready and ("regular" in kinds or {"prefill", "decode"} <= kinds)
        content = {
            "status": "ready" if ready else "draining" if self._parts.draining() else "not ready",
            "healthy_workers": len([w for w in workers if w.is_healthy]),
            "total_workers": len(workers),
        }
        await caller.reply_json(content, 200 if ready else 503)

    async def generates(self, caller: Caller, params: Params) -> None:
        """Answer 200 once a worker has generated a token."""
        for worker in servers(self._parts.registry.workers):
            if worker.available:
                said = await self._parts.probe.text(worker, "/health_generate", GENERATE_S)
                if said is not None:
                    await caller.reply(200, TEXT, b"OK")
                    return
        raise NoWorkerError("No worker has generated a token yet.")

    async def models(self, caller: Caller, params: Params) -> None:
        """List the models of all workers, without duplicates."""
        await caller.reply_json({"object": "list", "data": await self._cards()})

    async def model(self, caller: Caller, params: Params) -> None:
        """Describe one model."""
        for card in await self._cards():
            if card.get("id") == params["id"]:
                await caller.reply_json(card)
                return
        message = f"The model {params['id'][:200]!r} does not exist."
        raise RequestError(message, param="model", status=404)

    async def tags(self, caller: Caller, params: Params) -> None:
        """List the models in Ollama's format."""
        await caller.reply_json(await self._merged_models(caller.path))

    async def model_info(self, caller: Caller, params: Params) -> None:
        """Return the first worker's model information."""
        await caller.reply_json(await self._first_document("/model_info", "/get_model_info"))

    async def server_info(self, caller: Caller, params: Params) -> None:
        """Return the settings of the gateway and of all workers."""
        workers = servers(self._parts.registry.workers)
        found = await asyncio.gather(*(self._document(w, "/get_server_info") for w in workers))
        by_url = {w.url: d for w, d in zip(workers, found, strict=True) if d is not None}
        first = next(iter(by_url.values()), cast("dict[str, Any]", {}))
        kinds = {
            kind: [by_url[w.url] for w in workers if w.kind == kind and w.url in by_url]
            for kind in ("prefill", "decode")
        }
        paired = {kind: infos for kind, infos in kinds.items() if infos}
        states = [state for info in by_url.values() for state in _rows(info, "internal_states")]
        content = {
            **first,
            **paired,
            "internal_states": states,
            "gateway": {
                "version": VERSION,
                "startup_time": self._parts.started,
                "settings": self._parts.shown,
                "workers": [worker_view(worker) for worker in self._parts.registry.workers],
            },
        }
        await caller.reply_json(content)

    async def loads(self, caller: Caller, params: Params) -> None:
        """Return the loads of all workers in the format of a worker's own `/v1/loads`."""
        workers = servers(self._parts.registry.workers)
        found = await asyncio.gather(*(self._document(w, "/v1/loads") for w in workers))
        rows: list[dict[str, Any]] = []
        for worker, document in zip(workers, found, strict=True):
            rows += [{**row, "worker": worker.url} for row in _rows(document, "loads")]
        for number, row in enumerate(rows):
            row["dp_rank"] = number
        now = self._parts.wall()
        await caller.reply_json({"timestamp": now, "version": VERSION, "loads": rows})

    async def get_loads(self, caller: Caller, params: Params) -> None:
        """Return the number of requests at each worker."""
        rows = [
            {
                "worker": worker.url,
                "load": worker.load,
                "own_load": worker.num_running + worker.peer_running,
                "queued_tokens": worker.waiting_tokens,
            }
            for worker in self._parts.registry.workers
        ]
        await caller.reply_json({"workers": rows})

    async def engine_metrics(self, caller: Caller, params: Params) -> None:
        """Return the merged metrics of all workers, labelled by worker."""
        workers = servers(self._parts.registry.workers)
        texts = await asyncio.gather(
            *(self._parts.probe.text(w, "/metrics", ASK_S) for w in workers)
        )
        by_url = {w.url: text for w, text in zip(workers, texts, strict=True) if text is not None}
        await caller.reply(200, METRICS, merged(by_url).encode())

    async def _document(self, worker: Worker, path: str) -> dict[str, Any] | None:
        return await self._parts.probe.document(worker, path, ASK_S)

    async def _first_document(self, *paths: str) -> dict[str, Any]:
        for worker in servers(self._parts.registry.workers):
            for path in paths if worker.is_healthy else ():
                found = await self._document(worker, path)
                if found is not None:
                    return found
        raise NoWorkerError("No worker is available.")

    async def _cards(self) -> list[dict[str, Any]]:
        workers = servers(self._parts.registry.workers)
        found = await asyncio.gather(*(self._document(w, "/v1/models") for w in workers))
        cards: dict[str, dict[str, Any]] = {}
        for document in found:
            for card in _rows(document, "data"):
                cards.setdefault(str(card.get("id")), card)
        for name in self._parts.registry.models:  # set by the operator, or workers report none
            card = {"id": name, "object": "model", "created": int(self._parts.started)}
            cards.setdefault(name, {**card, "owned_by": "sylvan"})
        return list(cards.values())

    async def _merged_models(self, path: str) -> dict[str, Any]:
        workers = servers(self._parts.registry.workers)
        found = await asyncio.gather(*(self._document(w, path) for w in workers))
        models: dict[str, Any] = {}
        for document in found:
            for model in _rows(document, "models"):
                models.setdefault(str(model.get("name")), model)
        return {"models": list(models.values())}

    @staticmethod
    def _all(level: Level, handler: Handler, *paths: str) -> tuple[OwnRoute, ...]:
        return tuple(OwnRoute(path=path, handler=handler, level=level) for path in paths)


def _rows(document: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """Return the objects in a list of a document; ignore anything else a worker may send."""
    value: Any = (document or {}).get(name)
    if not isinstance(value, list):
        return []
    rows = cast("list[Any]", value)
    return [cast("dict[str, Any]", row) for row in rows if isinstance(row, dict)]

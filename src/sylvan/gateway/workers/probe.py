"""Asks HTTP workers what they serve and support."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from sylvan.config.route import HealthConfig, WorkersConfig
from sylvan.gateway.errors import UpstreamError
from sylvan.gateway.upstream.http import HttpUpstream, Outgoing, WholeResponse
from sylvan.gateway.workers.events import EVENT_SETTINGS
from sylvan.gateway.workers.spec import WorkerSpec
from sylvan.gateway.workers.worker import Discovered, Worker
from sylvan.protocol.journal import JOURNAL_HEADER, KEY_HEADER, PROBE, TICKET_HEADER
from sylvan.protocol.malformed import MALFORMED

T = TypeVar("T")

MAX_BYTES = 4 << 20
MAX_NAMES = 1024


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _Load(msgspec.Struct):
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_total_reqs: int | None = None
    max_total_num_tokens: int = 0

    @property
    def num_reqs(self) -> int:
        """Number of requests at the worker."""
        given = self.num_total_reqs
        return self.num_running_reqs + self.num_waiting_reqs if given is None else given


class _Loads(msgspec.Struct):
    loads: list[_Load]


@dataclass(frozen=True, slots=True)
class Reported:
    """The load that a worker reports.

    Attributes:
        num_reqs: Number of its requests.
        capacity_tokens: Capacity of its KV cache, in tokens.
    """

    num_reqs: int
    capacity_tokens: int


class HttpProbe:
    """Probes workers over HTTP.

    Args:
        upstream: HTTP client.
        workers: Credentials for workers.
        health: Health check settings.
        settings: Also ask new workers for their settings.
    """

    def __init__(
        self,
        upstream: HttpUpstream,
        workers: WorkersConfig,
        health: HealthConfig,
        *,
        settings: bool = False,
    ) -> None:
        self._upstream = upstream
        self._workers = workers
        self._health = health
        self._settings = settings

    async def is_healthy(self, worker: Worker, timeout_s: float) -> bool:
        """Whether a worker reports that it is healthy; also learns whether it accepts tickets."""
        request = self._request(worker.spec, self._health.path, self._ticket())
        try:
            answer = await self._upstream.call(request, timeout_s, MAX_BYTES)
        except UpstreamError:
            return False
        worker.found.journals = _takes_tickets(answer)
        return 200 <= answer.status < 300

    async def discover(self, spec: WorkerSpec, timeout_s: float) -> Discovered:
        """Ask a worker about itself.

        Raises:
            UpstreamError: It does not answer, or reports that it is unhealthy.
        """
        request = self._request(spec, self._health.path, self._ticket())
        answer = await self._upstream.call(request, timeout_s, MAX_BYTES)
        if not 200 <= answer.status < 300:
            message = f"{self._health.path} answers with status {answer.status}."
            raise UpstreamError(message, kind="status")
        models = await self._ask(spec, "/v1/models", _Models, timeout_s)
        details = await self._details(spec, timeout_s)
        loads = await self._ask(spec, "/v1/loads", _Loads, timeout_s)
        served = details.get("served_model_name")
        names = [model.id for model in models.data[:MAX_NAMES]] if models else []
        if not names and isinstance(served, str):
            names = [served]
        rows = loads.loads if loads else []
        info: Mapping[str, object] = {}
        if spec.dp_aware or self._settings:
            info = await self._server_info(spec, timeout_s)
        return Discovered(
            models=tuple(names),
            journals=_takes_tickets(answer),
            capacity_tokens=sum(row.max_total_num_tokens for row in rows),
            dp_size=_dp_size(info) if spec.dp_aware else 1,
            version=str(details.get("version", "")),
            details=details,
            settings={name: info[name] for name in EVENT_SETTINGS if info.get(name)},
        )

    async def load(self, worker: Worker, timeout_s: float) -> Reported | None:
        """Return a worker's load; None if it does not report one."""
        loads = await self._ask(worker.spec, "/v1/loads", _Loads, timeout_s)
        if loads is None or not loads.loads:
            return None
        rows = loads.loads
        if worker.dp_rank is not None and worker.dp_rank < len(rows):
            rows = [rows[worker.dp_rank]]
        return Reported(
            sum(row.num_reqs for row in rows), sum(row.max_total_num_tokens for row in rows)
        )

    async def document(self, worker: Worker, path: str, timeout_s: float) -> dict[str, Any] | None:
        """Fetch a JSON object from a worker; None if it fails."""
        return await self._ask(worker.spec, path, dict[str, Any], timeout_s)

    async def text(self, worker: Worker, path: str, timeout_s: float) -> str | None:
        """Fetch a text from a worker; None if it fails."""
        request = self._request(worker.spec, path)
        try:
            answer = await self._upstream.call(request, timeout_s, MAX_BYTES)
        except UpstreamError:
            return None
        return answer.body.decode(errors="replace") if answer.status == 200 else None

    async def _details(self, spec: WorkerSpec, timeout_s: float) -> dict[str, object]:
        for path in ("/model_info", "/get_model_info"):
            found = await self._ask(spec, path, dict[str, object], timeout_s)
            if found is not None:
                return found
        return {}

    async def _server_info(self, spec: WorkerSpec, timeout_s: float) -> Mapping[str, object]:
        for path in ("/server_info", "/get_server_info"):
            found = await self._ask(spec, path, dict[str, object], timeout_s)
            if found is not None:
                return found
        return {}

    async def _ask(self, spec: WorkerSpec, path: str, kind: type[T], timeout_s: float) -> T | None:
        """Return a worker's answer, if it has that type."""
        try:
            request = self._request(spec, path)
            answer = await self._upstream.call(request, timeout_s, MAX_BYTES)
            return msgspec.json.decode(answer.body, type=kind) if answer.status == 200 else None
        except (UpstreamError, *MALFORMED):
            return None

    def _ticket(self) -> list[tuple[str, str]]:
        key = self._workers.gateway_key
        known_by = [] if key is None else [(KEY_HEADER, key.reveal())]
        return [(TICKET_HEADER, PROBE), *known_by]

    def _request(
        self, spec: WorkerSpec, path: str, headers: Sequence[tuple[str, str]] = ()
    ) -> Outgoing:
        key = [] if spec.api_key is None else [("authorization", f"Bearer {spec.api_key}")]
        return Outgoing(method="GET", url=spec.url, target=path, headers=[*headers, *key])


def _takes_tickets(answer: WholeResponse) -> bool:
    return answer.header(JOURNAL_HEADER) == "1"


def _dp_size(info: Mapping[str, object]) -> int:
    size = info.get("dp_size")
    return size if isinstance(size, int) and 1 <= size <= 4096 else 1

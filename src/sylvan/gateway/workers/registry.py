"""All workers, by ID, address, model and kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from sylvan.gateway.errors import NoWorkerError, UnknownModelError
from sylvan.gateway.workers.ring import HashRing
from sylvan.gateway.workers.spec import KINDS, Connection, Kind
from sylvan.gateway.workers.worker import Worker

MAX_WORKERS = 4096

Listener = Callable[[Worker], None]


@dataclass(frozen=True, slots=True)
class _Group:
    """Workers that can serve the same requests; rebuilt whenever one of them changes.

    Attributes:
        workers: All of them.
        steady: Those whose availability changes with events only.
        shaky: Those whose circuit breaker decides, depending on time and trial requests.
        best: Those of `steady` with the highest priority.
    """

    workers: Sequence[Worker]
    steady: Sequence[Worker]
    shaky: Sequence[Worker]
    best: Sequence[Worker]

    @classmethod
    def of(cls, workers: Sequence[Worker]) -> _Group:
        """Group workers."""
        able = [w for w in workers if w.is_healthy and not w.draining]
        steady = [w for w in able if w.breaker.closed]
        return cls(workers, steady, [w for w in able if not w.breaker.closed], _best(steady))


def _best(workers: Sequence[Worker]) -> Sequence[Worker]:
    highest = max((w.spec.priority for w in workers), default=0)
    return [w for w in workers if w.spec.priority == highest]


class Registry:
    """The workers; subscribers that keep state per worker are notified of changes.

    Attributes:
        ring: Hash ring of all workers by ID.
        on_add: Called with each added worker.
        on_remove: Called with each removed worker.
        on_load: Called with each worker whose load changed.
    """

    def __init__(self) -> None:
        self.ring = HashRing()
        self.on_add: list[Listener] = []
        self.on_remove: list[Listener] = []
        self.on_load: list[Listener] = []
        self._workers: dict[str, Worker] = {}
        self._by_url: dict[str, Worker] = {}
        self._groups: dict[tuple[str | None, Kind, Connection | None], _Group] = {}
        self._sets: set[tuple[str, ...]] | None = None

    def __len__(self) -> int:
        return len(self._workers)

    def __contains__(self, worker: object) -> bool:
        return isinstance(worker, Worker) and self._workers.get(worker.id) is worker

    @property
    def workers(self) -> tuple[Worker, ...]:
        """All workers, in order of addition."""
        return tuple(self._workers.values())

    @property
    def models(self) -> tuple[str, ...]:
        """Names of all served models, without duplicates."""
        return tuple(dict.fromkeys(m for w in self._workers.values() for m in w.models))

    def get(self, worker_id: str) -> Worker | None:
        """Return the worker with that ID."""
        return self._workers.get(worker_id)

    def by_url(self, url: str) -> Worker | None:
        """Return the worker at that address."""
        return self._by_url.get(url)

    def add(self, worker: Worker) -> None:
        """Route to a worker as soon as it is healthy."""
        self._workers[worker.id] = worker
        self._by_url[worker.url] = worker
        self.ring.add(worker.id)
        worker.on_change.append(self.changed)
        worker.on_load.append(self._loaded)
        self.changed(worker)
        for listener in self.on_add:
            listener(worker)

    def remove(self, worker: Worker) -> None:
        """Forget a worker; its running requests are not interrupted."""
        if self._workers.pop(worker.id, None) is None:
            return
        if self._by_url.get(worker.url) is worker:
            del self._by_url[worker.url]
        self.ring.remove(worker.id)
        worker.on_change.remove(self.changed)
        worker.on_load.remove(self._loaded)
        self.changed(worker)
        for listener in self.on_remove:
            listener(worker)

    def changed(self, worker: Worker) -> None:
        """Regroup a worker whose models or availability changed."""
        self._groups.clear()
        self._sets = None

    def _loaded(self, worker: Worker) -> None:
        for listener in self.on_load:
            listener(worker)

    def has(self, kind: Kind, connection: Connection | None = None) -> bool:
        """Whether there is a worker of that kind, available or not."""
        return bool(self._group(None, kind, connection).workers)

    def candidates(
        self,
        model: str | None,
        kind: Kind = "regular",
        connection: Connection | None = None,
        *,
        avoid: AbstractSet[str] = frozenset(),
        continuing: bool = False,
    ) -> Sequence[Worker]:
        """Return the available workers of the highest priority.

        Args:
            model: Model name; None: any.
            kind: Worker kind.
            connection: Protocol; None: either.
            avoid: IDs of workers that are used only if there are no others.
            continuing: Only workers that can continue another worker's stream.

        Raises:
            UnknownModelError: No worker serves the model, while several models are served.
            NoWorkerError: No worker that serves it is available.
        """
        group = self._group(self.known_model(model), kind, connection)
        if not avoid and not continuing and not group.shaky and group.best:
            return group.best
        able = [*group.steady, *(worker for worker in group.shaky if worker.breaker.allows)]
        if continuing:
            able = [worker for worker in able if worker.found.journals]
        able = [worker for worker in able if worker.id not in avoid] or able
        if not able:
            raise NoWorkerError(self._why_none(model, kind, group.workers))
        return _best(able)

    def lost_s(
        self, model: str | None, kind: Kind = "regular", connection: Connection | None = None
    ) -> float | None:
        """When the last worker that could serve a model became unhealthy; None if none is.

        Raises:
            UnknownModelError: No worker serves the model, while several models are served.
        """
        group = self._group(self.known_model(model), kind, connection)
        lost = (w.health.lost_s for w in group.workers if not w.is_healthy and not w.draining)
        return max((at_s for at_s in lost if at_s is not None), default=None)

    def speaks(self, model: str | None, connection: Connection) -> bool:
        """Whether some worker of the model uses that protocol, available or not.

        Raises:
            UnknownModelError: No worker serves the model, while several models are served.
        """
        known = self.known_model(model)
        return any(self._group(known, kind, connection).workers for kind in KINDS)

    def paired(self, model: str | None, connection: Connection) -> bool:
        """Whether prefill and decode workers serve a model together, available or not.

        Regular workers of the model take precedence.

        Raises:
            UnknownModelError: No worker serves the model, while several models are served.
        """
        return self.single_kind(model, connection) == "prefill"

    def single_kind(self, model: str | None, connection: Connection) -> Kind:
        """Return the kind of worker for requests served by one worker; prefill workers run prompts.

        Raises:
            UnknownModelError: No worker serves the model, while several models are served.
        """
        known = self.known_model(model)
        if self._group(known, "regular", connection).workers:
            return "regular"
        pairs: tuple[Kind, Kind] = ("prefill", "decode")
        apart = any(self._group(known, kind, connection).workers for kind in pairs)
        return "prefill" if apart else "regular"

    def known_model(self, model: str | None) -> str | None:
        """Return the name under which a model is served; None if any worker will do.

        Raises:
            UnknownModelError: Several models are served, and not this one.
        """
        if self._sets is None:
            self._sets = {w.models for w in self._workers.values() if w.models}
        base = model.partition(":")[0] if model else None  # `base:adapter`
        for name in (model, base):
            if name and any(name in names for names in self._sets):
                return name
        if len(self._sets) <= 1:
            return None
        shown = ", ".join(sorted(self.models)[:20])
        if not model:
            message = f"model must be given; there are {shown}."
            raise UnknownModelError(message, status=400)
        raise UnknownModelError(f"The model {model[:200]!r} does not exist; there are {shown}.")

    def _group(self, model: str | None, kind: Kind, connection: Connection | None) -> _Group:
        key = (model, kind, connection)
        group = self._groups.get(key)
        if group is None:
            able = [
                worker
                for worker in self._workers.values()
                if worker.kind == kind
                and connection in (None, worker.connection)
                and (model is None or not worker.models or model in worker.models)
            ]
            group = self._groups[key] = _Group.of(able)
        return group

    def _why_none(self, model: str | None, kind: Kind, group: Sequence[Worker]) -> str:
        what = f"{kind} worker" if kind != "regular" else "worker"
        of = f" of model {model[:200]!r}" if model else ""
        if not group:
            return f"There is no {what}{of}."
        healthy = sum(worker.is_healthy for worker in group)
        return f"No {what}{of} is available: {healthy} of {len(group)} are healthy."

"""Messages between the processes of one gateway."""

from __future__ import annotations

import msgspec

from sylvan.gateway.workers.spec import Kind, WorkerSpec


class PeerPlacement(msgspec.Struct, tag="placed", array_like=True, frozen=True):
    """A policy placed a request.

    Attributes:
        model: Whose policy it was; "" if all workers serve the same models.
        kind: Likewise, the part in serving.
        worker: Name of the worker that it chose.
        branch: Why.
        prompt: See `RoutingRequest.prompt`; cut off where it is very long.
        namespace: See `RoutingRequest.namespace`.
        key: See `RoutingRequest.key`.
        at_s: When, by the clock of this machine.
    """

    model: str
    kind: Kind
    worker: str
    branch: str
    prompt: bytes
    namespace: str
    key: str
    at_s: float


class PeerLoads(msgspec.Struct, tag="loads", array_like=True, frozen=True):
    """How busy workers are with requests of the sender: running ones, and tokens to be computed.

    Attributes:
        rows: By name of the worker; those that are left out have not changed.
        complete: Those that are left out have none.
    """

    rows: dict[str, tuple[int, int]]
    complete: bool = False


class Spent(msgspec.Struct, tag="spent", array_like=True, frozen=True):
    """A tenant has used some of its budget."""

    tenant: str
    requests: int
    tokens: int


class WorkerChange(msgspec.Struct, tag="worker", array_like=True, frozen=True):
    """An operator added, changed or removed a worker.

    Attributes:
        url: Its address.
        version: Of two changes of one worker the one with the larger version counts.
        spec: As it is now; None: it is removed.
    """

    url: str
    version: tuple[int, int]
    spec: WorkerSpec | None


Message = PeerPlacement | PeerLoads | Spent | WorkerChange


class PeerBatch(msgspec.Struct, array_like=True, frozen=True):
    """What one process sends at a time.

    Attributes:
        process: Number of the sender.
        messages: In order.
    """

    process: int
    messages: list[Message]

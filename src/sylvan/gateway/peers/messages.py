"""Messages between the processes of one gateway."""

from __future__ import annotations

import msgspec

from sylvan.gateway.workers.spec import Kind, WorkerSpec


class PeerPlacement(msgspec.Struct, tag="placed", array_like=True, frozen=True):
    """A policy placed a request.

    Attributes:
        model: Model of the policy; "" if all workers serve the same models.
        kind: Worker kind of the policy; "" if all workers have the same kind.
        worker: Name of the selected worker.
        branch: Reason of the choice.
        prompt: See `RoutingRequest.prompt`; long ones are truncated.
        namespace: See `RoutingRequest.namespace`.
        key: See `RoutingRequest.key`.
        at_s: Time of the choice, by the clock of this machine.
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
    """Load that the sender's requests cause at workers: running requests, and tokens to compute.

    Attributes:
        rows: By name of the worker; missing ones have not changed.
        complete: Workers that are missing have no load.
    """

    rows: dict[str, tuple[int, int]]
    complete: bool = False


class BudgetSpent(msgspec.Struct, tag="spent", array_like=True, frozen=True):
    """A tenant used part of its budget."""

    tenant: str
    requests: int
    tokens: int


class WorkerChange(msgspec.Struct, tag="worker", array_like=True, frozen=True):
    """An operator added, changed or removed a worker.

    Attributes:
        url: Address of the worker.
        version: Of two changes to one worker, the larger version wins.
        spec: The new specification; None: removed.
    """

    url: str
    version: tuple[int, int]
    spec: WorkerSpec | None


Message = PeerPlacement | PeerLoads | BudgetSpent | WorkerChange


class PeerBatch(msgspec.Struct, array_like=True, frozen=True):
    """A batch of messages from one process.

    Attributes:
        process: Index of the sender.
        messages: The messages, in order.
    """

    process: int
    messages: list[Message]

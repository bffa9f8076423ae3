"""Which replica serves a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sylvan.protocol.messages import SchedulerLoad
from sylvan.protocol.requests import Request


class ReplicaView(Protocol):
    """State of a replica as policies see it."""

    @property
    def replica(self) -> int:
        """Its number, from 0."""
        ...

    @property
    def load(self) -> SchedulerLoad:
        """As of its last heartbeat; up to half a second old."""
        ...

    @property
    def num_samples(self) -> int:
        """Samples that it serves or has waiting; up to date."""
        ...


class ReplicaPolicy(Protocol):
    """Chooses a replica for each request."""

    def choose(self, request: Request, replicas: Sequence[ReplicaView]) -> int:
        """Index into `replicas`, which are the usable ones and at least one.

        All samples of a request go to the same replica; `request` is the first of them.
        """
        ...


class ReplicaRoundRobin:
    """Each request goes to the usable replica after the one chosen before."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, request: Request, replicas: Sequence[ReplicaView]) -> int:
        after = (i for i, view in enumerate(replicas) if view.replica > self._last)
        index = next(after, 0)
        self._last = replicas[index].replica
        return index

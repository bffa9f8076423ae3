"""Chooses the replica of a request."""

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
        """Load at its last heartbeat, up to half a second old."""
        ...

    @property
    def num_samples(self) -> int:
        """Samples that it runs or has queued; up to date."""
        ...


class ReplicaPolicy(Protocol):
    """Chooses a replica for each request."""

    def choose(self, request: Request, replicas: Sequence[ReplicaView]) -> int:
        """Return an index into `replicas`, the usable ones, of which there is at least one.

        All samples of a request go to the same replica; `request` is the first of them.
        """
        ...


class ReplicaRoundRobin:
    """Cycles through the usable replicas."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, request: Request, replicas: Sequence[ReplicaView]) -> int:
        after = (i for i, view in enumerate(replicas) if view.replica > self._last)
        index = next(after, 0)
        self._last = replicas[index].replica
        return index

"""Messages between the machines that serve one model together.

Node 0 has the HTTP server and the first rank; the others join it.
"""

from __future__ import annotations

import msgspec


class JoinNode(msgspec.Struct, frozen=True, kw_only=True, tag="join"):
    """A machine asks to join.

    Attributes:
        attempt: Random id of the request, so that a repeated one is recognised.
        node: Its number.
        nodes: The number of nodes that it was configured with.
        host: Its host name, for messages.
        version: Its version of Sylvan.
        checkpoint: Digest of its checkpoint.
        settings: Settings given by its operator, as text by path.
    """

    attempt: str
    node: int
    nodes: int
    host: str
    version: str
    checkpoint: str
    settings: dict[str, str]


class RanksReady(msgspec.Struct, frozen=True, tag="ready"):
    """All ranks of the sender have loaded their shard of the model."""

    run: int


class RanksEnded(msgspec.Struct, frozen=True, tag="ended"):
    """All ranks of the sender have ended; `reason` says why they could not start, else empty.

    `code` is an exit code, or the negative number of a signal.
    """

    run: int
    code: int
    reason: str = ""


class NodeAlive(msgspec.Struct, frozen=True, tag="alive"):
    """Heartbeat of a node."""


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The machine may join; it waits for `StartRanks`."""


class NodeRefused(msgspec.Struct, frozen=True, tag="refused"):
    """The machine may not join."""

    reason: str


class StartRanks(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """Start the ranks of the receiver.

    Attributes:
        run: Number of this start; earlier runs have ended.
        port: Port of the first rank's steps, at the address of node 0.
        tokens: Authentication tokens of the ranks.
    """

    run: int
    port: int
    tokens: dict[int, str]


class EndRanks(msgspec.Struct, frozen=True, tag="end"):
    """End the ranks of a run."""

    run: int


class HeadAlive(msgspec.Struct, frozen=True, tag="alive"):
    """Heartbeat of node 0."""


class AskJoin(msgspec.Struct, frozen=True, tag="ask"):
    """Node 0 does not know the receiver, because node 0 was restarted."""


class StopNode(msgspec.Struct, frozen=True, tag="stop"):
    """Node 0 stops; no messages follow."""


ToHead = JoinNode | RanksReady | RanksEnded | NodeAlive
ToNode = Welcome | NodeRefused | StartRanks | EndRanks | HeadAlive | AskJoin | StopNode

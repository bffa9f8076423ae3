"""What the machines that serve one model together say to each other.

Node 0 is the one with the HTTP server and the first rank; the others join it.
"""

from __future__ import annotations

import msgspec


class JoinNode(msgspec.Struct, frozen=True, kw_only=True, tag="join"):
    """A machine is there.

    Attributes:
        attempt: A random name; one that is known already has been answered.
        node: Its number.
        nodes: How many it was told there are.
        host: Its name, for messages.
        version: Of Sylvan.
        checkpoint: Digest of the checkpoint that it has.
        settings: What its operator gave, as text by path.
    """

    attempt: str
    node: int
    nodes: int
    host: str
    version: str
    checkpoint: str
    settings: dict[str, str]


class RanksReady(msgspec.Struct, frozen=True, tag="ready"):
    """All ranks of the sender hold their part of the model."""

    run: int


class RanksEnded(msgspec.Struct, frozen=True, tag="ended"):
    """No rank of the sender runs any more; `reason`: why they could not start, or empty.

    `code` is an exit code, or minus the number of a signal.
    """

    run: int
    code: int
    reason: str = ""


class NodeAlive(msgspec.Struct, frozen=True, tag="alive"):
    """The sender runs."""


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The machine takes part; ranks are to be started when it is told to."""


class NodeRefused(msgspec.Struct, frozen=True, tag="refused"):
    """The machine cannot take part."""

    reason: str


class StartRanks(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """Start the ranks of the receiver.

    Attributes:
        run: Number of the start; those before have ended.
        port: Where the first rank's steps are, at the address of node 0.
        tokens: By which ranks show there who they are.
    """

    run: int
    port: int
    tokens: dict[int, str]


class EndRanks(msgspec.Struct, frozen=True, tag="end"):
    """End the ranks of a run."""

    run: int


class HeadAlive(msgspec.Struct, frozen=True, tag="alive"):
    """Node 0 runs."""


class AskJoin(msgspec.Struct, frozen=True, tag="ask"):
    """Node 0 does not know the receiver: it has been started anew."""


class StopNode(msgspec.Struct, frozen=True, tag="stop"):
    """Node 0 stops; nothing follows."""


ToHead = JoinNode | RanksReady | RanksEnded | NodeAlive
ToNode = Welcome | NodeRefused | StartRanks | EndRanks | HeadAlive | AskJoin | StopNode

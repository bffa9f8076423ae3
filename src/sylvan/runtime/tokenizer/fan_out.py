"""Sends commands to all replicas, and merges their answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from sylvan.protocol.commands import (
    BalanceExperts,
    HashWeights,
    JoinGroup,
    ReadWeights,
    UpdateWeights,
)
from sylvan.protocol.messages import (
    CachePrompts,
    CacheRequest,
    CacheTree,
    Command,
    ControlReply,
    Pause,
    SchedulerLoad,
    SetWeightVersion,
)
from sylvan.protocol.tiers import TierLoad

_COUNTS = tuple(
    f.name
    for f in msgspec.structs.fields(SchedulerLoad)
    if f.name not in ("paused", "tiers", "disagg")
)


def merged_load(loads: Sequence[SchedulerLoad]) -> SchedulerLoad:
    """Sum all counts and rates; paused if all are."""
    if len(loads) == 1:
        return loads[0]
    counts = {name: sum(getattr(load, name) for load in loads) for name in _COUNTS}
    tiers = [load.tiers for load in loads if load.tiers is not None]
    return SchedulerLoad(
        **counts,
        paused=all(load.paused for load in loads),
        tiers=_merged_tiers(tiers) if tiers else None,
        disagg=loads[0].disagg if loads else None,  # a server with a role has one replica
    )


def _merged_tiers(loads: Sequence[TierLoad]) -> TierLoad:
    names = TierLoad.__struct_fields__
    return TierLoad(**{name: sum(getattr(load, name) for load in loads) for name in names})


def command_for(command: Command, replica: int, count: int) -> Command:
    """Return the command for one of `count` replicas, such that the merged replies are right."""
    if isinstance(command, JoinGroup):
        return msgspec.structs.replace(command, replica=replica)
    if isinstance(command, CacheTree):
        return msgspec.structs.replace(command, max_nodes=max(1, command.max_nodes // count))
    return command


def merged_reply(command: Command, replies: Sequence[ControlReply]) -> ControlReply:
    """Merge the replies of all replicas, given in order.

    Fails if one failed. Only the replica that served a request explains it. Bodies that
    cannot be summed are listed under `replicas`.
    """
    if len(replies) == 1:
        return replies[0]
    if isinstance(command, CacheRequest):
        return next((reply for reply in replies if reply.ok), replies[0])
    if (failed := next((reply for reply in replies if not reply.ok), None)) is not None:
        return failed
    bodies = [reply.body for reply in replies if reply.body is not None]
    body = _merged_body(command, bodies) if bodies else None
    return ControlReply(id=replies[0].id, ok=True, body=body)


def _merged_body(command: Command, bodies: Sequence[dict[str, Any]]) -> dict[str, Any]:
    match command:
        case Pause():
            merged = {name: sum(body[name] for body in bodies) for name in bodies[0]}
        case UpdateWeights():
            paused = sum(body.get("num_paused_requests", 0) for body in bodies)
            merged = {**bodies[0], "num_paused_requests": paused}
        case ReadWeights() | HashWeights() | SetWeightVersion() | BalanceExperts():
            merged = bodies[0]  # all replicas have the same weights
        case CachePrompts():
            merged = {"prompts": [prompt for body in bodies for prompt in body["prompts"]]}
        case CacheTree():
            merged = _merged_trees(bodies)
        case _:
            merged = {"replicas": list(bodies)}
    return merged


def _merged_trees(bodies: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join the roots of all replicas into one tree; each node names its replica."""
    nodes: list[dict[str, Any]] = []
    for replica, body in enumerate(bodies):
        first = len(nodes)
        for node in body["nodes"]:
            parent = node["parent"] + first if node["parent"] >= 0 else -1
            ids = {"id": node["id"] + first, "parent": parent, "dp_rank": replica}
            nodes.append({**node, **ids})
    counts = [name for name in bodies[0] if name not in ("page_size", "nodes")]
    return {
        "page_size": bodies[0]["page_size"],
        **{name: sum(body[name] for body in bodies) for name in counts},
        "nodes": nodes,
    }

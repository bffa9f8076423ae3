"""Reads the NUMA nodes of this machine, and binds ranks to their cores. Never fails."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

Cores = frozenset[int]


def memory_nodes(root: Path = Path("/")) -> list[Cores]:
    """Return the cores of each NUMA node that has some; empty: unknown.

    Args:
        root: Directory with `sys`; replaced in tests.
    """
    folders = sorted(
        (root / "sys/devices/system/node").glob("node[0-9]*"), key=lambda path: int(path.name[4:])
    )
    return [cores for folder in folders if (cores := _listed(folder / "cpulist"))]


def cores_of_rank(nodes: Sequence[Cores], allowed: Cores, rank: int, ranks: int) -> Cores | None:
    """Return the cores of the NUMA node, or nodes, of one of several ranks of this machine.

    If there are more ranks than nodes, neighbouring ranks share a node. None if there is no choice:
    one rank, or only one node that this process may use.
    """
    usable = [node & allowed for node in nodes if node & allowed]
    if ranks < 2 or len(usable) < 2:
        return None
    first = rank * len(usable) // ranks
    last = max(first + 1, (rank + 1) * len(usable) // ranks) if ranks < len(usable) else first + 1
    return frozenset[int]().union(*usable[first:last])


def bind_to_node(rank: int, ranks: int, threads: int, root: Path = Path("/")) -> Cores | None:
    """Bind this thread, and threads that it starts, to the cores of a rank.

    Memory that they touch first is then allocated on that node, so that weights and KV of a rank
    are near the threads that read them. Does nothing if the node has fewer cores than `threads`.

    Returns: The cores; None if nothing changed.
    """
    if not hasattr(os, "sched_setaffinity"):  # not on macOS and Windows
        return None
    mine = cores_of_rank(memory_nodes(root), frozenset(os.sched_getaffinity(0)), rank, ranks)
    if mine is None or len(mine) < threads:
        return None
    os.sched_setaffinity(0, mine)
    return mine


def _listed(path: Path) -> Cores:
    """Read a list of numbers such as `0-3,8`."""
    try:
        parts = [part.split("-") for part in path.read_text().strip().split(",") if part]
        return frozenset(n for part in parts for n in range(int(part[0]), int(part[-1]) + 1))
    except (OSError, ValueError):
        return frozenset()

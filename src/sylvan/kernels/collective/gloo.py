"""Collectives between processes through process groups of torch.distributed; here gloo on TCP."""

from __future__ import annotations

import importlib
import socket
from datetime import timedelta
from typing import Any

import torch
from torch.nn import functional

from sylvan.kernels.collective.reference import tree_sum
from sylvan.protocol.errors import RankLostError

_LOOPBACK = "127.0.0.1"
_OPTIONS, _DEVICES, _TIMEOUT = "_Options", "_devices", "_timeout"
_FEW_RANKS = 3  # up to here both ways send the same number of bytes
_SHARED_SUM = 1024
"""Minimum numbers per share: summing by shares takes two exchanges, so short messages lose."""


class GroupRanks:
    """Implements `Communicator` over a process group of torch.distributed.

    Args:
        group: A backend, such as `ProcessGroupGloo`, that has exactly these ranks.
    """

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._group = group

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        if not x.numel():  # a step that samples nothing: there is nothing to exchange
            return x.new_empty(self.size, *x.shape)
        given = _bytes(x)
        found = given.new_empty(self.size, len(given))
        self._wait(lambda group: group.allgather([list(found)], [given]))
        return found.view(x.dtype).view(self.size, *x.shape)

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        if not x.numel():
            return torch.empty_like(x)
        given = _bytes(x)
        found = torch.empty_like(given)
        self._wait(lambda group: group.alltoall_base(found, given, [], []))
        return found.view(x.dtype).view(x.shape)

    def all_sum(self, x: torch.Tensor) -> torch.Tensor:
        if self.size < _FEW_RANKS or x.numel() < _SHARED_SUM * self.size:
            return tree_sum(self.all_gather(x))
        return self._sum_by_shares(x)

    def check(self) -> None:
        """Do nothing: no native program runs collectives."""

    def close(self) -> None:
        """Leave the group; ranks that wait for this one get RankLostError."""
        self._group = None

    def _sum_by_shares(self, x: torch.Tensor) -> torch.Tensor:
        """Reduce-scatter, then all-gather: each rank sums a share, which sends fewer bytes."""
        flat = x.reshape(-1)
        each = -(-flat.numel() // self.size)
        parts = functional.pad(flat, (0, each * self.size - flat.numel())).view(self.size, each)
        sums = self.all_gather(tree_sum(self.all_to_all(parts)))
        return sums.view(-1)[: flat.numel()].view(x.shape)

    def _wait(self, start: Any) -> None:
        try:
            start(self._group).wait()
        except (RuntimeError, AttributeError) as error:
            raise RankLostError(f"another rank has exited or timed out: {error}") from error


def join_ranks(
    store: Any,
    rank: int,
    size: int,
    timeout_s: float,
    step_timeout_s: float,
    host: str = _LOOPBACK,
) -> GroupRanks:
    """Form a group with the other ranks.

    Args:
        store: Store through which the ranks find each other; used by this group only.
        rank: Rank of this process.
        size: Number of ranks.
        timeout_s: Time limit for all ranks to join.
        step_timeout_s: Time limit of a collective.
        host: Address of this machine at which the others reach this rank.

    Raises:
        RankLostError: Ranks did not join in time; the message names them.
    """
    gloo = importlib.import_module("torch.distributed").ProcessGroupGloo
    await_ranks(store, rank, size, timeout_s)
    options = getattr(gloo, _OPTIONS)()  # the public constructor listens on any interface
    setattr(options, _DEVICES, [gloo.create_device(hostname=host)])
    setattr(options, _TIMEOUT, timedelta(seconds=step_timeout_s))
    try:
        return GroupRanks(gloo(store, rank, size, options), rank, size)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise RankLostError(f"{size} ranks cannot connect to each other: {reason}") from error


def await_ranks(store: Any, rank: int, size: int, timeout_s: float) -> None:
    """Wait until all ranks have connected to a store.

    Raises:
        RankLostError: Ranks did not join in time; the message names the first.
    """
    missing = 0
    try:
        store.set(f"rank-{rank}", b"here")
        for missing in range(size):
            store.wait([f"rank-{missing}"], timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise RankLostError(
            f"rank {missing} of {size} did not join within {timeout_s:g} s"
        ) from error


def file_store(path: str, size: int) -> Any:
    """A store for ranks on one machine: a file that does not exist yet."""
    c10d: Any = importlib.import_module("torch.distributed")
    return c10d.FileStore(path, size)


def part_of_store(store: Any, name: str) -> Any:
    """Return a prefixed store, so that several groups can share one store."""
    c10d: Any = importlib.import_module("torch.distributed")
    return c10d.PrefixStore(name, store)


def listening_store(host: str, timeout_s: float) -> Any:
    """Start a store for ranks on several machines in this process; its `port` is chosen here.

    Args:
        host: Address of this machine to listen at.
        timeout_s: Time limit of each operation.

    Raises:
        OSError: The address cannot be listened on.
    """
    c10d: Any = importlib.import_module("torch.distributed")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.bind((host, 0))
        sock.listen()
        port = sock.getsockname()[1]
        return c10d.TCPStore(
            host,
            port,
            None,
            True,
            timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=sock.detach(),
            use_libuv=False,  # libuv would listen on all interfaces
        )


def remote_store(host: str, port: int, timeout_s: float) -> Any:
    """Connect to the store of another process.

    Raises:
        RankLostError: The store cannot be reached.
    """
    c10d: Any = importlib.import_module("torch.distributed")
    try:
        return c10d.TCPStore(
            host,
            port,
            None,
            False,
            timedelta(seconds=timeout_s),
            wait_for_workers=False,
            use_libuv=False,
        )
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise RankLostError(f"rank 0 cannot be reached at {host}:{port}: {reason}") from error


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """View x as contiguous bytes, because gloo does not support every type."""
    return x.detach().contiguous().view(-1).view(torch.uint8)

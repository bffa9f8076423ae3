"""Splits a command into commands for all ranks, and merges their results.

Every rank checks an update before any rank writes. If a tensor does not fit, or is not finite in
the shard of one rank, no rank changes anything.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import msgspec
import numpy as np
import xxhash

from sylvan.protocol.commands import (
    CommandResult,
    DescribeMemory,
    ExecutorCommand,
    GroupTensors,
    HashWeights,
    JoinGroup,
    LoadWeights,
    NamedTensors,
    ReadWeights,
    SharedTensors,
    ShareWeights,
    SocketTensors,
    UnloadWeights,
    UpdateWeights,
)
from sylvan.protocol.errors import RankLostError
from sylvan.runtime.executor.control import ELSEWHERE
from sylvan.runtime.executor.sources import SHARED

_NAME = "update of ranks"

Round = Sequence[ExecutorCommand]
"""Commands of one round: one for the first rank only, or one per rank."""
Plan = Generator[Round, list[CommandResult], CommandResult]
"""Yields rounds, receives their results in rank order, and returns one result."""


class CommandRound(Protocol):
    """A round in progress."""

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self) -> list[CommandResult]:
        """Block until all ranks are done; return the results in rank order.

        Raises:
            RankLostError: a rank has ended.
        """
        ...


class Rounds:
    """Implements `PendingCommand`: all ranks finish a round before the next one starts."""

    def __init__(self, plan: Plan, send: Callable[[Round], CommandRound]) -> None:
        self._plan, self._send = plan, send
        self._result: CommandResult | None = None
        self._current = send(next(plan))

    def done(self) -> bool:
        while self._result is None and self._current.done():
            self._advance()
        return self._result is not None

    def wait(self) -> CommandResult:
        """See `PendingCommand.wait`.

        Raises:
            RankLostError: the command failed on some ranks only, or a rank has ended.
        """
        while self._result is None:
            self._advance()
        return self._result

    def _advance(self) -> None:
        results = self._current.wait()
        try:
            self._current = self._send(self._plan.send(results))
        except StopIteration as end:
            self._result = end.value


def plan_of(command: ExecutorCommand, size: int) -> Plan | str:
    """Return the rounds in which `size` ranks run a command, or the reason why they cannot."""
    if isinstance(command, DescribeMemory):
        return "DescribeMemory is not possible while several ranks share the model"
    return _PLANS.get(type(command), _alike)(command, size)


def _alike(command: ExecutorCommand, size: int) -> Plan:
    """Send the same command to every rank; return the first rank's result."""
    return _agreed((yield [command] * size))


def _join(command: JoinGroup, size: int) -> Plan:
    first = command.rank + command.replica * size
    each = [msgspec.structs.replace(command, rank=first + n, replica=0) for n in range(size)]
    return _agreed((yield each))


def _load(command: LoadWeights, size: int) -> Plan:
    """A socket sends its files only once: the first rank receives, the others read its copy."""
    if not isinstance(command.source, SocketTensors):
        return _agreed((yield [command] * size))
    [shared] = yield [ShareWeights(command.source)]
    if shared.error:
        return shared
    copy = SharedTensors(shared.body["name"], shared.body["num_bytes"])
    try:
        return _agreed((yield [LoadWeights(command.name, copy)] * size))
    finally:
        (SHARED / copy.name).unlink()


def _update(command: UpdateWeights, size: int) -> Plan:
    """Receive once; all ranks check, then all or none write."""
    comes_once = isinstance(command.source, GroupTensors | SocketTensors)
    if comes_once:
        loaded = yield from _load(LoadWeights(_NAME, command.source), size)
        if loaded.error:
            return loaded
        command = msgspec.structs.replace(command, source=NamedTensors(_NAME))
    checked = yield [msgspec.structs.replace(command, check_only=True)] * size
    result = next((found for found in checked if found.error), None)
    if result is None:
        written = yield [command] * size
        most = max(found.body.get("num_tensors", 0) for found in written)  # experts may differ
        result = _agreed(written)
        result = msgspec.structs.replace(result, body={**result.body, "num_tensors": most})
    if comes_once:
        _agreed((yield [UnloadWeights(_NAME)] * size))
    return result


def _read(command: ReadWeights, size: int) -> Plan:
    results = yield [command] * size
    results = [found for found in results if ELSEWHERE not in found.body] or results
    first = _agreed(results)
    if first.error or "places" not in first.body:
        return first
    shape: list[int] = first.body["shape"]
    rows = np.zeros((min(command.most, shape[0]), *shape[1:]), np.float32)
    for found in results:
        if found.body["values"]:
            rows[np.ix_(*found.body["places"])] = found.body["values"]
    return CommandResult({"shape": shape, "values": rows.tolist()}, blocked=first.blocked)


def _hash(command: HashWeights, size: int) -> Plan:
    """One checksum per tensor: combined from the ranks' checksums of their shares, in order."""
    results = yield [command] * size
    first = _agreed(results)
    if first.error:
        return first
    every: list[dict[str, str]] = [found.body["checksums"] for found in results]
    names = {name: None for sums in every for name in sums}  # a rank may lack some tensors
    joined = {name: " ".join(s[name] for s in every if name in s).encode() for name in names}
    sums: dict[str, Any] = {name: xxhash.xxh3_128_hexdigest(all_) for name, all_ in joined.items()}
    return msgspec.structs.replace(first, body={"checksums": sums})


def _agreed(results: Sequence[CommandResult]) -> CommandResult:
    """Return the first rank's result.

    Raises:
        RankLostError: the command failed on some ranks only.
    """
    errors = [found.error for found in results]
    if any(errors) and not all(errors):
        raise RankLostError(f"a command failed on some ranks only: {next(filter(None, errors))}")
    return results[0]


_PLANS: Mapping[type[ExecutorCommand], Callable[[Any, int], Plan]] = MappingProxyType(
    {
        JoinGroup: _join,
        LoadWeights: _load,
        UpdateWeights: _update,
        ReadWeights: _read,
        HashWeights: _hash,
    }
)

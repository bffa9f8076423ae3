"""Commands that several ranks carry out together: what each is told, and one result of theirs.

An update is checked by every rank before any writes: a tensor that does not fit, or is not finite
in the share of one rank, changes nothing on all of them.
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
"""What is told next: one command to the first rank alone, or one to each."""
Plan = Generator[Round, list[CommandResult], CommandResult]
"""Asks for rounds, is sent their results in the order of ranks, and returns one result."""


class CommandRound(Protocol):
    """A round on its way."""

    def done(self) -> bool:
        """Whether `wait` returns at once."""
        ...

    def wait(self) -> list[CommandResult]:
        """The results, in the order of ranks.

        Raises:
            RankLostError: a rank has ended.
        """
        ...


class Rounds:
    """Implements `PendingCommand`: each round is carried out by all before the next begins."""

    def __init__(self, plan: Plan, tell: Callable[[Round], CommandRound]) -> None:
        self._plan, self._tell = plan, tell
        self._result: CommandResult | None = None
        self._told = tell(next(plan))

    def done(self) -> bool:
        while self._result is None and self._told.done():
            self._advance()
        return self._result is not None

    def wait(self) -> CommandResult:
        """See `PendingCommand.wait`.

        Raises:
            RankLostError: some ranks carried it out and others could not, or one has ended.
        """
        while self._result is None:
            self._advance()
        return self._result

    def _advance(self) -> None:
        results = self._told.wait()
        try:
            self._told = self._tell(self._plan.send(results))
        except StopIteration as end:
            self._result = end.value


def plan_of(command: ExecutorCommand, size: int) -> Plan | str:
    """How `size` ranks carry out a command; or why they cannot."""
    if isinstance(command, DescribeMemory):
        return "DescribeMemory is not possible while several ranks share the model"
    return _PLANS.get(type(command), _alike)(command, size)


def _alike(command: ExecutorCommand, size: int) -> Plan:
    """The same for every rank; the result is the first one's."""
    return _agreed((yield [command] * size))


def _join(command: JoinGroup, size: int) -> Plan:
    first = command.rank + command.replica * size
    each = [msgspec.structs.replace(command, rank=first + n, replica=0) for n in range(size)]
    return _agreed((yield each))


def _load(command: LoadWeights, size: int) -> Plan:
    """A socket gives its files once: the first rank asks, and the others read its copy."""
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
    """Received once, checked by all, and written by all or by none."""
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
        most = max(found.body.get("num_tensors", 0) for found in written)  # some have fewer experts
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
    """One checksum of each tensor: of those that the ranks have of their shares, in order."""
    results = yield [command] * size
    first = _agreed(results)
    if first.error:
        return first
    every: list[dict[str, str]] = [found.body["checksums"] for found in results]
    names = {name: None for sums in every for name in sums}  # some ranks have some of them
    joined = {name: " ".join(s[name] for s in every if name in s).encode() for name in names}
    sums: dict[str, Any] = {name: xxhash.xxh3_128_hexdigest(all_) for name, all_ in joined.items()}
    return msgspec.structs.replace(first, body={"checksums": sums})


def _agreed(results: Sequence[CommandResult]) -> CommandResult:
    """The first rank's result.

    Raises:
        RankLostError: some ranks carried it out and others could not.
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

"""Runs commands between steps: weights, memory, health. One for all backends."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from sylvan.kernels.api import Unsupported
from sylvan.protocol.commands import (
    MEMORY_TAGS,
    BalanceExperts,
    CheckHealth,
    CommandResult,
    DescribeMemory,
    DiskTensors,
    ExecutorCommand,
    HashWeights,
    JoinGroup,
    LeaveGroup,
    LoadWeights,
    MemoryTag,
    ReadWeights,
    ReleaseMemory,
    ResumeMemory,
    ShareWeights,
    StartProfile,
    StopProfile,
    UnloadWeights,
    UpdateWeights,
)
from sylvan.protocol.errors import ConfigError, SylvanError
from sylvan.runtime.core.memory import PageMemory
from sylvan.runtime.executor.background_writes import BackgroundWrites
from sylvan.runtime.executor.capability import CapabilityWorker, Handler
from sylvan.runtime.executor.failures import FAILURES
from sylvan.runtime.executor.profiling import MeasuredProgram, Profiling
from sylvan.runtime.executor.sources import WeightSources
from sylvan.runtime.executor.update_groups import UpdateGroups
from sylvan.runtime.models.live import LiveWeights
from sylvan.runtime.models.stored import WeightFiles
from sylvan.runtime.pool.releasable import ReleasableMemory

logger = logging.getLogger(__name__)

_MAX_BYTES_PER_NUMBER = 8
"""Limit of stored tensors, in bytes per weight: trainers send float32, and tied tensors twice."""
ELSEWHERE = "elsewhere"
"""Key of a result by which a rank says that only other ranks hold the tensor."""
Body = dict[str, Any]
"""Body of a result; JSON-like."""


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Checkpoints of the served model.

    Attributes:
        loaded_from: Directory of the weights; None for random weights.
        check: Raises ConfigError for the directory of another model.
        num_ranks: Number of executors that share the model.
    """

    loaded_from: DiskTensors | None = None
    check: Callable[[Path], None] = lambda path: None
    num_ranks: int = 1


@dataclass(slots=True)
class StepGate:
    """Whether steps may run: `closed` is the reason why not, None if they may."""

    closed: str | None = None


class ExecutorControl:
    """Runs commands on an executor between steps.

    Args:
        weights: The model's weights, or the reason why they cannot be read or replaced.
        memory: Memory that can be released, by tag.
        groups: KV groups.
        checkpoints: The model's checkpoints.
        on_release: Called after memory was released.
        on_resume: Called after all memory was restored, possibly at new addresses.

    Attributes:
        gate: Closed while weights or memory are released.
    """

    def __init__(
        self,
        weights: LiveWeights | str,
        memory: Mapping[MemoryTag, ReleasableMemory],
        groups: Sequence[PageMemory],
        checkpoints: Checkpoints,
        on_release: Callable[[], None] = lambda: None,
        on_resume: Callable[[], None] = lambda: None,
    ) -> None:
        self._weights, self._memory, self._groups = weights, dict(memory), groups
        self._origin, self._check_config = checkpoints.loaded_from, checkpoints.check
        self._on_release, self._on_resume = on_release, on_resume
        self._update_groups = UpdateGroups()
        self._profiling = Profiling()
        numbers = weights.num_numbers if isinstance(weights, LiveWeights) else 0
        most = _MAX_BYTES_PER_NUMBER * numbers * checkpoints.num_ranks
        self._sources = WeightSources(self._update_groups, most)
        self._released: dict[MemoryTag, int] = {}
        self._writes: BackgroundWrites | None = None
        self.gate = StepGate()
        self._handlers: dict[type[ExecutorCommand], Callable[[Any], Body]] = {
            LoadWeights: self._load,
            ShareWeights: self._share,
            UnloadWeights: self._unload,
            UpdateWeights: self._update,
            ReadWeights: self._read,
            HashWeights: self._hash,
            ReleaseMemory: self._release,
            ResumeMemory: self._resume,
            DescribeMemory: self._describe,
            CheckHealth: self._health,
            JoinGroup: self._join,
            LeaveGroup: self._leave,
            StartProfile: self._profiling.start,
            StopProfile: self._profiling.stop,
        }

    def measure(self, program: MeasuredProgram) -> None:
        """Start or stop measuring the ops of the step program."""
        self._profiling.program = program

    def finish_first(self, writes: BackgroundWrites) -> None:
        """Wait for `writes`, which read the weights, before a command changes the weights."""
        self._writes = writes

    def move_experts(self, mover: Callable[[Callable[[], WeightFiles]], Handler]) -> None:
        """Handle `BalanceExperts` with the handler that `mover` builds from a checkpoint opener."""
        self._handlers[BalanceExperts] = mover(self._served_files)

    def _served_files(self) -> WeightFiles:
        if self._origin is None:
            raise ConfigError("experts cannot be moved: the weights do not come from a checkpoint")
        return self._sources.open(self._origin)

    def extend(self, workers: Sequence[CapabilityWorker]) -> None:
        """Register the commands that worker halves of capabilities handle."""
        for worker in workers:
            self._handlers |= worker.commands

    @property
    def blocked(self) -> str | None:
        """Why no step may run now; None if steps may run."""
        if self._released:
            return f"the memory of {', '.join(self._released)} has been released"
        return self._weights.missing if isinstance(self._weights, LiveWeights) else None

    def run(self, command: ExecutorCommand) -> CommandResult:
        """Run a command; errors are part of its result."""
        error, status = "", 400
        body: Body = {}
        if self._writes is not None and not isinstance(command, CheckHealth):
            self._writes.wait()
        try:
            body = self._handler(command)(command)
        except ConfigError as refused:
            error = str(refused)
        except (SylvanError, Unsupported, OSError, *FAILURES) as failed:
            logger.exception("command %s failed", type(command).__name__)
            error, status = str(failed) or type(failed).__name__, 500
        self.gate.closed = self.blocked
        return CommandResult(body, error, status, self.gate.closed or "")

    def close(self) -> None:
        """Leave all groups, and finish background writes."""
        if self._writes is not None:
            self._writes.close()
        self._update_groups.close()
        self._profiling.close()

    def _handler(self, command: ExecutorCommand) -> Handler:
        found = self._handlers.get(type(command))
        if found is None and isinstance(command, BalanceExperts):
            raise ConfigError("experts are not divided among ranks (parallel.ep)")
        if found is None:
            raise ConfigError(f"{type(command).__name__} needs a capability that is off")
        return found

    def _load(self, command: LoadWeights) -> Body:
        return {"num_tensors": len(self._sources.keep(command.name, command.source).tensors)}

    def _share(self, command: ShareWeights) -> Body:
        name, num_bytes = self._sources.share(command.source)
        return {"name": name, "num_bytes": num_bytes}

    def _unload(self, command: UnloadWeights) -> Body:
        return {"num_tensors": self._sources.drop(command.name)}

    def _health(self, command: CheckHealth) -> Body:
        return {"healthy": self.blocked is None, "reason": self.blocked or ""}

    def _join(self, command: JoinGroup) -> Body:
        rank = command.rank + command.replica
        self._update_groups.join(msgspec.structs.replace(command, rank=rank))
        return {}

    def _leave(self, command: LeaveGroup) -> Body:
        self._update_groups.leave(command.name)
        return {}

    # ---- weights

    @property
    def _live(self) -> LiveWeights:
        if "weights" in self._released:
            raise ConfigError("the memory of the weights has been released; resume it first")
        if isinstance(self._weights, str):
            raise ConfigError(self._weights)
        return self._weights

    def _update(self, command: UpdateWeights) -> Body:
        live = self._live
        files = self._sources.open(command.source)
        if isinstance(command.source, DiskTensors):
            self._check_config(Path(command.source.path))
        whole = not command.partial
        if command.check_only:
            live.check(files, partial=command.partial)
            return {}
        names = live.update(files, partial=command.partial)
        named = isinstance(command.source, DiskTensors) and whole
        self._origin = command.source if named else None
        return {"num_tensors": len(names)}

    def _read(self, command: ReadWeights) -> Body:
        if self._live.is_elsewhere(command.name):
            return {ELSEWHERE: True}
        found, most = self._live.tensor(command.name), command.most
        places = self._live.places(command.name)
        if places is None:
            return {"shape": list(found.shape), "values": found[:most].float().tolist()}
        shape, (rows, *others) = places
        own = rows < most
        return {
            "shape": list(shape),
            "values": found[torch.from_numpy(own)].float().tolist(),
            "places": [rows[own].tolist(), *(each.tolist() for each in others)],
        }

    def _hash(self, command: HashWeights) -> Body:
        return {"checksums": self._live.checksums(command.skip)}

    # ---- memory

    def _release(self, command: ReleaseMemory) -> Body:
        tags = command.tags
        self._check_tags(tags)
        freed: dict[str, int] = {}
        for tag in tags or tuple(self._memory):
            if tag in self._released:
                continue
            freed[tag] = self._memory[tag].release()
            self._released[tag] = freed[tag]
            if tag == "weights" and isinstance(self._weights, LiveWeights):
                self._weights.mark_released()
        self._on_release()
        return {"released_bytes": freed, "released": list(self._released)}

    def _resume(self, command: ResumeMemory) -> Body:
        tags = command.tags
        self._check_tags(tags)
        again: list[MemoryTag] = [tag for tag in self._released if not tags or tag in tags]
        for tag in again:
            if tag != "graphs":  # restored last: they hold addresses of the other memory
                self._memory[tag].resume()
            del self._released[tag]
        if "weights" in again and self._origin is not None:
            try:
                self._live.update(self._sources.open(self._origin), partial=False)
            except ConfigError as error:
                logger.warning("the weights cannot be reloaded, they must be sent: %s", error)
        if again and not self._released:
            self._on_resume()
        return {"resumed": again, "released": list(self._released)}

    def _check_tags(self, tags: Sequence[MemoryTag]) -> None:
        for tag in tags:
            if tag not in self._memory:
                there = ", ".join(t for t in MEMORY_TAGS if t in self._memory)
                raise ConfigError(
                    f"tags: this executor cannot release memory {tag!r}; it has {there or 'none'}"
                )

    def _describe(self, command: DescribeMemory) -> Body:
        groups = [
            {
                "num_pages": group.num_pages,
                "page_size": group.page_size,
                "page_bytes": group.page_bytes,
                "regions": [
                    {"address": r.address, "stride": r.stride, "num_bytes": r.num_bytes}
                    for r in group.regions(0)
                ],
            }
            for group in self._groups
        ]
        sizes = {tag: memory.num_bytes for tag, memory in self._memory.items()}
        return {"kv_groups": groups, "num_bytes": sizes, "released": list(self._released)}

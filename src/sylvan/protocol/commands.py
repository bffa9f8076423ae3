"""Commands to an executor, which runs them between two steps: weights, memory, health.

They are data: the API process sends them to the scheduler in a `Control`, which forwards them to
the executor, in this process, another one, or on each rank (see `core.wire`). Tensors travel as
safetensors files, never as pickles: on a disk, in shared memory, or as bytes.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np

MemoryTag = Literal["weights", "kv_cache", "graphs"]
MEMORY_TAGS: tuple[MemoryTag, ...] = ("weights", "kv_cache", "graphs")


class DiskTensors(msgspec.Struct, frozen=True, tag="disk"):
    """The checkpoint in a directory of the executor's machine."""

    path: str
    load_format: str = "auto"


class BytesTensors(msgspec.Struct, frozen=True, tag="bytes"):
    """A safetensors file as bytes."""

    data: np.ndarray  # uint8 (n,)


class SharedTensors(msgspec.Struct, frozen=True, tag="shared"):
    """A safetensors file in POSIX shared memory of the executor's machine; only read.

    `name` is that of `multiprocessing.shared_memory`. The memory may be larger than the file.
    """

    name: str
    num_bytes: int


class GroupTensors(msgspec.Struct, frozen=True, tag="group"):
    """Tensors that rank 0 of an update group broadcasts, one after another in this order.

    With `flat` it broadcasts once: the bytes of all tensors, concatenated, as uint8.
    """

    group: str
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    flat: bool = False


class SocketTensors(msgspec.Struct, frozen=True, tag="socket"):
    """Safetensors files that a ZeroMQ REP socket of this machine sends on request, one per message.

    Each request is `next`; an empty answer ends the update.
    """

    address: str


class NamedTensors(msgspec.Struct, frozen=True, tag="named"):
    """All tensors that `LoadWeights` stored under a name."""

    name: str


TensorSource = (
    DiskTensors | BytesTensors | SharedTensors | GroupTensors | SocketTensors | NamedTensors
)


class LoadWeights(msgspec.Struct, frozen=True, tag="load_weights"):
    """Store tensors next to the model under a name, in addition to those already stored."""

    name: str
    source: TensorSource


class ShareWeights(msgspec.Struct, frozen=True, tag="share_weights"):
    """Copy tensors into shared memory for other processes; the caller removes it.

    The result has the `name` of the memory and `num_bytes`.
    """

    source: TensorSource


class UnloadWeights(msgspec.Struct, frozen=True, tag="unload_weights"):
    """Free the tensors stored under a name."""

    name: str


class UpdateWeights(msgspec.Struct, frozen=True, tag="update_weights"):
    """Replace weights of the model in place: all tensors of the source, or none.

    With `partial`, the source may lack some of the model's tensors. `version` is the new label of
    the weights; None keeps the old one. With `flush`, nothing computed with the old weights is used
    any more: unfinished requests recompute their KV. With `abort` they end. With `check_only`
    everything is checked, and nothing is written.
    """

    source: TensorSource
    partial: bool = True
    version: str | None = None
    flush: bool = True
    abort: bool = False
    check_only: bool = False


class ReadWeights(msgspec.Struct, frozen=True, tag="read_weights"):
    """Read the first rows of a tensor of the model, at most `most`."""

    name: str
    most: int = 100


class HashWeights(msgspec.Struct, frozen=True, tag="hash_weights"):
    """Compute a checksum of each model tensor except those in `skip`."""

    skip: tuple[str, ...] = ()


class BalanceExperts(msgspec.Struct, frozen=True, tag="balance_experts"):
    """Move experts between groups of ranks, by their rows since the last call.

    The result has `moved`, the number of experts that are new to a group; and `before` and `after`:
    the mean over layers of a group's mean work divided by that of the busiest group.
    """


class ReleaseMemory(msgspec.Struct, frozen=True, tag="release_memory"):
    """Release memory to the system until `ResumeMemory`. Nothing is computed meanwhile.

    No tags: everything that can be released.
    """

    tags: tuple[MemoryTag, ...] = ()


class ResumeMemory(msgspec.Struct, frozen=True, tag="resume_memory"):
    """Restore released memory, and reload weights that came from a disk.

    No tags: everything that was released.
    """

    tags: tuple[MemoryTag, ...] = ()


class DescribeMemory(msgspec.Struct, frozen=True, tag="describe_memory"):
    """Report the pages of each KV group, and the bytes of each tag."""


class CheckHealth(msgspec.Struct, frozen=True, tag="check_health"):
    """Report whether steps can run, and if not, why."""


class JoinGroup(msgspec.Struct, frozen=True, tag="join_group"):
    """Become rank `rank` of a process group that broadcasts weights.

    `rank` is that of the first rank of the first replica; the others follow, replica by replica.
    """

    name: str
    address: str
    port: int
    rank: int
    world_size: int
    backend: str = "gloo"
    timeout_s: float = 60.0
    replica: int = 0


class LeaveGroup(msgspec.Struct, frozen=True, tag="leave_group"):
    """Leave a process group."""

    name: str


class StartProfile(msgspec.Struct, frozen=True, tag="start_profile"):
    """Start to record where steps spend their time.

    `folder` is on the executor's machine. `activities`: CPU and GPU, of PyTorch's profiler.
    """

    folder: str
    name: str
    activities: tuple[str, ...] = ("CPU", "GPU")
    with_stack: bool = False
    record_shapes: bool = False


class StopProfile(msgspec.Struct, frozen=True, tag="stop_profile"):
    """Write what was recorded since `StartProfile`; the result lists the `files`."""


class LoadAdapter(msgspec.Struct, frozen=True, tag="load_adapter"):
    """Read a LoRA adapter from a directory of the executor's machine into host memory.

    The result has the id by which requests name it (`GenerateRequest.lora`), its rank, and its size
    in bytes. If `pinned`, it is never evicted from host memory or its device slot. Without `keep`
    it is only checked, and read again when a request uses it.
    """

    name: str
    path: str
    pinned: bool = False
    keep: bool = True


ExecutorCommand = (
    LoadWeights
    | ShareWeights
    | UnloadWeights
    | UpdateWeights
    | ReadWeights
    | HashWeights
    | BalanceExperts
    | ReleaseMemory
    | ResumeMemory
    | DescribeMemory
    | CheckHealth
    | JoinGroup
    | LeaveGroup
    | LoadAdapter
    | StartProfile
    | StopProfile
)


class CommandResult(msgspec.Struct, frozen=True):
    """Result of a command, JSON-like.

    `error` is the reason of a failure that changed nothing, with its HTTP status. `blocked` is the
    reason why no step may run afterwards, if any.
    """

    body: dict[str, Any] = {}
    error: str = ""
    status: int = 400
    blocked: str = ""

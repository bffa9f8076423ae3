"""Commands to an executor, which runs them between two steps: weights, memory, health.

They are data: from the API process they reach the scheduler in a `Control`, and it hands them on to
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
    """A safetensors file in POSIX shared memory of the executor's machine; it is only read.

    `name` as `multiprocessing.shared_memory` gives it. The memory may be larger than the file.
    """

    name: str
    num_bytes: int


class GroupTensors(msgspec.Struct, frozen=True, tag="group"):
    """Tensors that rank 0 of an update group broadcasts, one after another in this order.

    With `flat` it broadcasts once: the bytes of all, one after another, as uint8.
    """

    group: str
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    flat: bool = False


class SocketTensors(msgspec.Struct, frozen=True, tag="socket"):
    """Safetensors files that a ZeroMQ REP socket of this machine gives when asked, one a message.

    Each request is `next`; an empty answer ends the update.
    """

    address: str


class NamedTensors(msgspec.Struct, frozen=True, tag="named"):
    """All that `LoadWeights` has kept under a name."""

    name: str


TensorSource = (
    DiskTensors | BytesTensors | SharedTensors | GroupTensors | SocketTensors | NamedTensors
)


class LoadWeights(msgspec.Struct, frozen=True, tag="load_weights"):
    """Keep tensors beside the model under a name, in addition to those already kept."""

    name: str
    source: TensorSource


class ShareWeights(msgspec.Struct, frozen=True, tag="share_weights"):
    """Copy tensors into shared memory for other processes; the caller removes it.

    The result has the `name` of the memory and `num_bytes`.
    """

    source: TensorSource


class UnloadWeights(msgspec.Struct, frozen=True, tag="unload_weights"):
    """Free the tensors kept under a name."""

    name: str


class UpdateWeights(msgspec.Struct, frozen=True, tag="update_weights"):
    """Replace weights of the model in place: all of those of the source, or none.

    With `partial` it need not have all of the model's tensors. `version` is the new label of the
    weights; None keeps the old one. With `flush` nothing that was computed with the old weights is
    used any more: requests under way compute their KV again. With `abort` they end. With
    `check_only` all is checked, and nothing is written.
    """

    source: TensorSource
    partial: bool = True
    version: str | None = None
    flush: bool = True
    abort: bool = False
    check_only: bool = False


class ReadWeights(msgspec.Struct, frozen=True, tag="read_weights"):
    """The first rows of one tensor of the model, at most `most`."""

    name: str
    most: int = 100


class HashWeights(msgspec.Struct, frozen=True, tag="hash_weights"):
    """Compute a checksum of each model tensor except those in `skip`."""

    skip: tuple[str, ...] = ()


class BalanceExperts(msgspec.Struct, frozen=True, tag="balance_experts"):
    """Move experts between groups of ranks, by the rows that they had since the last time.

    The result has `moved`, how many experts came to a group that did not have them; and `before`
    and `after`: the mean over layers of the mean work of a group by that of the busiest one.
    """


class ReleaseMemory(msgspec.Struct, frozen=True, tag="release_memory"):
    """Give memory back to the system until `ResumeMemory`. Nothing is computed meanwhile.

    No tags: all that can be given.
    """

    tags: tuple[MemoryTag, ...] = ()


class ResumeMemory(msgspec.Struct, frozen=True, tag="resume_memory"):
    """Take memory again that was given back, and read weights again that came from a disk.

    No tags: all that was given back.
    """

    tags: tuple[MemoryTag, ...] = ()


class DescribeMemory(msgspec.Struct, frozen=True, tag="describe_memory"):
    """Where the pages of each KV group lie, and how many bytes each tag has."""


class CheckHealth(msgspec.Struct, frozen=True, tag="check_health"):
    """Whether steps can be run, and if not, why."""


class JoinGroup(msgspec.Struct, frozen=True, tag="join_group"):
    """Become rank `rank` of a process group from which weights will come.

    `rank` is that of the first rank of the first replica; the others' follow, replica by replica.
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
    """Record what steps spend their time on, from now on.

    `folder` is of the executor's machine. `activities`: CPU and GPU, of PyTorch's profiler.
    """

    folder: str
    name: str
    activities: tuple[str, ...] = ("CPU", "GPU")
    with_stack: bool = False
    record_shapes: bool = False


class StopProfile(msgspec.Struct, frozen=True, tag="stop_profile"):
    """Write down what was recorded since `StartProfile`; its result names the `files`."""


class LoadAdapter(msgspec.Struct, frozen=True, tag="load_adapter"):
    """Read a LoRA adapter from a directory of the executor's machine, and keep it in host memory.

    Its result tells the id by which requests name it (`GenerateRequest.lora`), its rank, and its
    size in bytes. `pinned` it leaves neither host memory nor its slot on the device. Without `keep`
    it is only checked, and read again when a request asks for it.
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
    reason why no step may run afterwards, if so.
    """

    body: dict[str, Any] = {}
    error: str = ""
    status: int = 400
    blocked: str = ""

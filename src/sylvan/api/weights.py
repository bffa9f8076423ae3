"""Bodies of the routes about weights and memory, and the commands that they stand for."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, Field

from sylvan.api.validation import ClosedModel, WireModel
from sylvan.protocol.commands import (
    BytesTensors,
    DiskTensors,
    GroupTensors,
    HashWeights,
    JoinGroup,
    MemoryTag,
    ReadWeights,
    SharedTensors,
    SocketTensors,
    TensorSource,
    UpdateWeights,
)
from sylvan.protocol.errors import RequestError

_TAGS: dict[str, MemoryTag] = {
    "weights": "weights",
    "kv_cache": "kv_cache",
    "cuda_graph": "graphs",
    "graphs": "graphs",
}
Name = Annotated[str, Field(min_length=1, max_length=256)]
_MOST_BYTES = 1 << 50
Selector = Literal["target", "all", "draft"]


class SharedFile(ClosedModel):
    """A safetensors file in POSIX shared memory of the server's machine."""

    shared_memory: Name
    """Its name."""
    num_bytes: Annotated[int, Field(ge=8, le=_MOST_BYTES)]
    """Length of the file; the memory may be larger. It must stay as it is until the answer."""


class UpdateBody(WireModel):
    """What all updates have in common."""

    flush_cache: bool = True
    """Use nothing again that was computed with the old weights: requests under way compute their
    keys and values anew, and the prefix cache is emptied."""
    abort_all_requests: bool = False
    """End all requests."""
    weight_version: Annotated[str, Field(max_length=256)] | None = None
    """New label of the weights, told in every answer."""


class DiskBody(UpdateBody):
    """Replace all weights by those of a checkpoint on the server's machine."""

    model_path: Annotated[str, Field(min_length=1, max_length=4096)]
    """Its directory; the architecture must be that of the model."""
    load_format: Literal["auto", "safetensors", "pt", "gguf"] | None = None
    """Format of the files; default: what is there, but no pickles."""
    keep_pause: bool = False
    """Stay paused afterwards."""


class TensorBody(UpdateBody):
    """Replace some weights, or all, by those of safetensors files."""

    serialized_named_tensors: Annotated[list[str | SharedFile], Field(min_length=1, max_length=64)]
    """For each tensor-parallel rank a safetensors file: base64, or where it lies in shared memory.
    Pickles are refused."""
    load_format: Literal["direct", "safetensors"] | None = None
    """Both are safetensors."""
    selector: Selector = "all"
    """Which model; there are no draft weights."""


class GroupBody(WireModel):
    """Enter a process group from which weights will come."""

    master_address: Annotated[str, Field(min_length=1, max_length=253)]
    """Where rank 0, the trainer, keeps the store."""
    master_port: Annotated[int, Field(ge=1, le=65535)]
    """And its port."""
    rank_offset: Annotated[int, Field(ge=0, le=65535)]
    """Rank of the first replica."""
    world_size: Annotated[int, Field(ge=2, le=65536)]
    """Ranks in all."""
    group_name: Name = "weight_update_group"
    """Name of the group, the same on all ranks."""
    backend: Name = "gloo"
    """Of torch.distributed; gloo."""


class LeaveBody(WireModel):
    """Leave a process group."""

    group_name: Name = "weight_update_group"
    """Its name."""


class DistributedBody(UpdateBody):
    """Replace weights by tensors that rank 0 of a group broadcasts."""

    names: Annotated[list[Name], Field(min_length=1, max_length=65536)]
    """Of the tensors, in the order in which they are sent."""
    dtypes: list[Annotated[str, Field(max_length=32)]]
    """Their types, such as `bfloat16`."""
    shapes: list[Annotated[list[Annotated[int, Field(ge=0, le=_MOST_BYTES)]], Field(max_length=8)]]
    """Their shapes."""
    group_name: Name = "weight_update_group"
    """The group."""
    load_format: Literal["flattened_bucket"] | None = None
    """`flattened_bucket`: all of them in one broadcast of bytes, one after another."""
    selector: Selector = "all"
    """Which model; there are no draft weights."""


class SocketBody(UpdateBody):
    """Replace weights by safetensors files that a ZeroMQ socket gives."""

    zmq_handles: Annotated[dict[str, Annotated[str, Field(max_length=256)]], Field(max_length=64)]
    """One REP socket of this machine (`ipc://`, `tcp://127.0.0.1`), whatever its key: it is asked
    with `next` for one file after another; an empty answer is the end."""


class BracketBody(WireModel):
    """Begin or end an update that takes several calls."""

    selector: Selector = "all"
    """Which model; there are no draft weights."""


class VersionBody(WireModel):
    """Label the weights."""

    new_version: Annotated[str, Field(max_length=256)]
    """The label."""
    abort_all_requests: bool = True
    """End all requests first, so that no answer has two labels."""


class TensorQuery(WireModel):
    """Which tensor to read."""

    name: Name | None = None
    """As in the checkpoint."""
    truncate_size: Annotated[int, Field(ge=1, le=1_000_000)] = 100
    """Rows at most."""


class CheckerBody(WireModel):
    """What to check."""

    action: Literal["checksum"] = "checksum"
    """XXH3-128 of each tensor's numbers, in the order of the checkpoint."""
    skip_tensor_list: list[Name] | None = None
    """Tensors that are left out."""
    selector: Selector = "all"
    """Which model; there are no draft weights."""


class MemoryBody(WireModel):
    """Which memory to give back, or to take again."""

    tags: list[Literal["weights", "kv_cache", "cuda_graph", "graphs"]] | None = None
    """`graphs` and `cuda_graph` are the same; default: all."""


class UpdateReply(BaseModel):
    """Outcome of an update."""

    success: bool
    message: str
    num_paused_requests: int | None = None
    weight_version: str | None = None


class ChecksumReply(BaseModel):
    """Outcome of a check."""

    success: bool
    message: str
    checksums: dict[str, str] = {}


class BalanceReply(BaseModel):
    """How experts were moved: how many, and the balance of groups before and after."""

    success: bool
    message: str
    moved: int = 0
    before: float = 1.0
    after: float = 1.0


class MemoryReply(BaseModel):
    """Outcome of giving memory back, or taking it again."""

    success: bool
    message: str
    released_bytes: dict[str, int] = {}
    released: list[str] = []


def check_selector(selector: Selector) -> None:
    """Refuse what concerns draft weights alone.

    Raises:
        RequestError: it does.
    """
    if selector == "draft":
        raise RequestError("selector: there are no draft weights.", param="selector")


def update_of(body: UpdateBody, source: TensorSource, *, partial: bool) -> UpdateWeights:
    """The command of an update."""
    return UpdateWeights(
        source,
        partial=partial,
        version=body.weight_version,
        flush=body.flush_cache,
        abort=body.abort_all_requests,
    )


def disk_source(body: DiskBody) -> DiskTensors:
    """The checkpoint of a body."""
    return DiskTensors(body.model_path, body.load_format or "auto")


def tensor_source(body: TensorBody) -> TensorSource:
    """The safetensors file of a body.

    Raises:
        RequestError: there is one for more than one rank, or no base64.
    """
    check_selector(body.selector)
    field = "serialized_named_tensors"
    if len(body.serialized_named_tensors) > 1:
        count = len(body.serialized_named_tensors)
        raise RequestError(f"{field} has {count} entries, for 1 rank.", param=field)
    [given] = body.serialized_named_tensors
    if isinstance(given, SharedFile):
        return SharedTensors(given.shared_memory, given.num_bytes)
    try:
        data = base64.b64decode(given, validate=True)
    except (binascii.Error, ValueError):
        raise RequestError(f"{field}[0] is no base64.", param=field) from None
    return BytesTensors(np.frombuffer(data, np.uint8))


def group_source(body: DistributedBody) -> GroupTensors:
    """The broadcasts of a body.

    Raises:
        RequestError: the lists differ in length.
    """
    check_selector(body.selector)
    for field, values in (("dtypes", body.dtypes), ("shapes", body.shapes)):
        if len(values) != len(body.names):
            raise RequestError(
                f"{field} has {len(values)} entries for {len(body.names)} names.", param=field
            )
    return GroupTensors(
        body.group_name,
        tuple(body.names),
        tuple(body.dtypes),
        tuple(tuple(shape) for shape in body.shapes),
        flat=body.load_format == "flattened_bucket",
    )


def socket_source(body: SocketBody) -> SocketTensors:
    """The socket of a body.

    Raises:
        RequestError: there is not exactly one.
    """
    if len(body.zmq_handles) != 1:
        raise RequestError(
            f"zmq_handles has {len(body.zmq_handles)} entries, for 1 rank.", param="zmq_handles"
        )
    return SocketTensors(next(iter(body.zmq_handles.values())))


def group_of(body: GroupBody) -> JoinGroup:
    """The command of a body."""
    return JoinGroup(
        body.group_name,
        body.master_address,
        body.master_port,
        body.rank_offset,
        body.world_size,
        body.backend,
    )


def reading_of(body: TensorQuery, query: TensorQuery) -> ReadWeights:
    """Which tensor is asked for, by body or query.

    Raises:
        RequestError: none is named.
    """
    name = body.name or query.name
    if name is None:
        raise RequestError("name is missing.", param="name")
    given: Any = body if body.name else query
    return ReadWeights(name, given.truncate_size)


def check_of(body: CheckerBody) -> HashWeights:
    """The command of a body.

    Raises:
        RequestError: it is about draft weights.
    """
    check_selector(body.selector)
    return HashWeights(tuple(body.skip_tensor_list or ()))


def tags_of(body: MemoryBody) -> tuple[MemoryTag, ...]:
    """The tags as executors know them; none: all."""
    return tuple(dict.fromkeys(_TAGS[tag] for tag in body.tags or ()))

"""Bodies of the weight and memory routes, and their conversion to commands."""

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
_MAX_BYTES = 1 << 50
Selector = Literal["target", "all", "draft"]


class SharedFile(ClosedModel):
    """A safetensors file in POSIX shared memory on the server."""

    shared_memory: Name
    """Its name."""
    num_bytes: Annotated[int, Field(ge=8, le=_MAX_BYTES)]
    """Length of the file; the memory may be larger. It must not change until the answer."""


class UpdateBody(WireModel):
    """Fields common to all updates."""

    flush_cache: bool = True
    """Discard everything computed with the old weights: running requests recompute their KV,
    and the prefix cache is emptied."""
    abort_all_requests: bool = False
    """Abort all requests."""
    weight_version: Annotated[str, Field(max_length=256)] | None = None
    """New version label of the weights, reported in every answer."""


class DiskBody(UpdateBody):
    """Replace all weights with those of a checkpoint on the server."""

    model_path: Annotated[str, Field(min_length=1, max_length=4096)]
    """Its directory; the architecture must match the model's."""
    load_format: Literal["auto", "safetensors", "pt", "gguf"] | None = None
    """Format of the files; default: detected, except pickles."""
    keep_pause: bool = False
    """Stay paused after the update."""


class TensorBody(UpdateBody):
    """Replace some or all weights with those of safetensors files."""

    serialized_named_tensors: Annotated[list[str | SharedFile], Field(min_length=1, max_length=64)]
    """One safetensors file per tensor-parallel rank: base64, or a reference to shared memory.
    Pickles are rejected."""
    load_format: Literal["direct", "safetensors"] | None = None
    """Both mean safetensors."""
    selector: Selector = "all"
    """Which model; draft weights cannot be updated."""


class GroupBody(WireModel):
    """Join a process group that will broadcast weights."""

    master_address: Annotated[str, Field(min_length=1, max_length=253)]
    """Host of rank 0, the trainer, which runs the store."""
    master_port: Annotated[int, Field(ge=1, le=65535)]
    """Port of the store."""
    rank_offset: Annotated[int, Field(ge=0, le=65535)]
    """Rank of the first replica."""
    world_size: Annotated[int, Field(ge=2, le=65536)]
    """Number of ranks."""
    group_name: Name = "weight_update_group"
    """Name of the group, the same on all ranks."""
    backend: Name = "gloo"
    """Backend of torch.distributed; default: gloo."""


class LeaveBody(WireModel):
    """Leave a process group."""

    group_name: Name = "weight_update_group"
    """Its name."""


class DistributedBody(UpdateBody):
    """Replace weights with tensors that rank 0 of a group broadcasts."""

    names: Annotated[list[Name], Field(min_length=1, max_length=65536)]
    """Names of the tensors, in broadcast order."""
    dtypes: list[Annotated[str, Field(max_length=32)]]
    """Their dtypes, such as `bfloat16`."""
    shapes: list[Annotated[list[Annotated[int, Field(ge=0, le=_MAX_BYTES)]], Field(max_length=8)]]
    """Their shapes."""
    group_name: Name = "weight_update_group"
    """Name of the group."""
    load_format: Literal["flattened_bucket"] | None = None
    """`flattened_bucket`: all tensors in one broadcast, concatenated as bytes."""
    selector: Selector = "all"
    """Which model; draft weights cannot be updated."""


class SocketBody(UpdateBody):
    """Replace weights with safetensors files from a ZeroMQ socket."""

    zmq_handles: Annotated[dict[str, Annotated[str, Field(max_length=256)]], Field(max_length=64)]
    """One local REP socket (`ipc://`, `tcp://127.0.0.1`) under any key. The server sends `next` to
    request each file; an empty answer ends the update."""


class BracketBody(WireModel):
    """Begin or commit an update of several calls."""

    selector: Selector = "all"
    """Which model; draft weights cannot be updated."""


class VersionBody(WireModel):
    """A version label for the weights."""

    new_version: Annotated[str, Field(max_length=256)]
    """The label."""
    abort_all_requests: bool = True
    """Abort all requests first, so that no answer has two labels."""


class TensorQuery(WireModel):
    """The tensor to read."""

    name: Name | None = None
    """Its name in the checkpoint."""
    truncate_size: Annotated[int, Field(ge=1, le=1_000_000)] = 100
    """Largest number of rows."""


class CheckerBody(WireModel):
    """The check to run."""

    action: Literal["checksum"] = "checksum"
    """XXH3-128 of each tensor's values, in checkpoint order."""
    skip_tensor_list: list[Name] | None = None
    """Tensors to skip."""
    selector: Selector = "all"
    """Which model; draft weights cannot be checked."""


class MemoryBody(WireModel):
    """The memory to release or resume."""

    tags: list[Literal["weights", "kv_cache", "cuda_graph", "graphs"]] | None = None
    """`graphs` and `cuda_graph` are synonyms; default: all."""


class UpdateReply(BaseModel):
    """Result of an update."""

    success: bool
    message: str
    num_paused_requests: int | None = None
    weight_version: str | None = None


class ChecksumReply(BaseModel):
    """Result of a check."""

    success: bool
    message: str
    checksums: dict[str, str] = {}


class BalanceReply(BaseModel):
    """Number of experts that moved, and the balance of groups before and after."""

    success: bool
    message: str
    moved: int = 0
    before: float = 1.0
    after: float = 1.0


class MemoryReply(BaseModel):
    """Result of releasing or resuming memory."""

    success: bool
    message: str
    released_bytes: dict[str, int] = {}
    released: list[str] = []


def check_selector(selector: Selector) -> None:
    """Reject requests about draft weights only.

    Raises:
        RequestError: The request is about draft weights.
    """
    if selector == "draft":
        raise RequestError("selector: draft weights cannot be updated.", param="selector")


def update_of(body: UpdateBody, source: TensorSource, *, partial: bool) -> UpdateWeights:
    """Convert the body to the update command."""
    return UpdateWeights(
        source,
        partial=partial,
        version=body.weight_version,
        flush=body.flush_cache,
        abort=body.abort_all_requests,
    )


def disk_source(body: DiskBody) -> DiskTensors:
    """Return the checkpoint of a body."""
    return DiskTensors(body.model_path, body.load_format or "auto")


def tensor_source(body: TensorBody) -> TensorSource:
    """Read the safetensors file of a body.

    Raises:
        RequestError: There is more than one rank's file, or the base64 is invalid.
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
        raise RequestError(f"{field}[0] is not base64.", param=field) from None
    return BytesTensors(np.frombuffer(data, np.uint8))


def group_source(body: DistributedBody) -> GroupTensors:
    """Return the broadcasts of a body.

    Raises:
        RequestError: The lists differ in length.
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
    """Return the socket of a body.

    Raises:
        RequestError: There is not exactly one.
    """
    if len(body.zmq_handles) != 1:
        raise RequestError(
            f"zmq_handles has {len(body.zmq_handles)} entries, for 1 rank.", param="zmq_handles"
        )
    return SocketTensors(next(iter(body.zmq_handles.values())))


def group_of(body: GroupBody) -> JoinGroup:
    """Convert the body to the command."""
    return JoinGroup(
        body.group_name,
        body.master_address,
        body.master_port,
        body.rank_offset,
        body.world_size,
        body.backend,
    )


def reading_of(body: TensorQuery, query: TensorQuery) -> ReadWeights:
    """Return the tensor named in body or query.

    Raises:
        RequestError: None is named.
    """
    name = body.name or query.name
    if name is None:
        raise RequestError("name is missing.", param="name")
    given: Any = body if body.name else query
    return ReadWeights(name, given.truncate_size)


def check_of(body: CheckerBody) -> HashWeights:
    """Convert the body to the command.

    Raises:
        RequestError: The request is about draft weights.
    """
    check_selector(body.selector)
    return HashWeights(tuple(body.skip_tensor_list or ()))


def tags_of(body: MemoryBody) -> tuple[MemoryTag, ...]:
    """Return the tags under the executor's names; none: all."""
    return tuple(dict.fromkeys(_TAGS[tag] for tag in body.tags or ()))

"""Loads the weights of a traced graph onto the devices, one at a time, sharded or replicated.

Query heads, gates and what follows them are sharded as in tensor parallelism: the first matrix by
outputs, the second by inputs; XLA adds the partial sums. Weights that do not divide evenly, and
experts, are replicated on each device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch.nn import functional as F

from sylvan.kernels.api import LinearWeight
from sylvan.kernels.matmul.weights import DeferredWeight, QuantisedWeight
from sylvan.kernels.native.graph import Graph
from sylvan.kernels.native.opset import (
    Activation,
    Attention,
    Embed,
    Glu,
    Linear,
    MoeAlign,
    RopeStore,
)
from sylvan.kernels.native.schema import Op, buffers_of
from sylvan.kernels.xla.heads import head_sizes
from sylvan.kernels.xla.values import Weights

AXIS = "model"
"""Mesh axis of the devices that share each matrix."""
DATA = "data"
"""Mesh axis of the groups of devices that have different requests, each with all weights."""
WHOLE = PartitionSpec()
_OUTPUTS, _INPUTS = PartitionSpec(AXIS, None), PartitionSpec(None, AXIS)


@dataclass(frozen=True, slots=True)
class _Division:
    """Outputs of each part of a matrix, and how the parts are sharded."""

    sizes: tuple[int, ...]
    specs: tuple[PartitionSpec, ...]


def load_weights(graph: Graph, mesh: Mesh) -> Weights:
    """Load all constants that ops read; frees the weights of `graph`.

    Args:
        graph: Traced graph.
        mesh: The devices, along `DATA` and `AXIS`.
    """
    divided, stacks = _divisions(graph, mesh.shape[AXIS]), _expert_stacks(graph)
    matrices: dict[int, tuple[jax.Array, ...]] = {}
    for ref in sorted(graph.weights, reverse=True):
        whole = _numbers(graph.weights[ref], graph.dtype)
        if ref in stacks:
            whole = np.ascontiguousarray(whole.swapaxes(1, 2))  # as `ragged_dot` reads it
        division = divided.get(ref) or _Division((whole.shape[0],), (WHOLE,))
        ends = np.cumsum(division.sizes)[:-1]
        parts = zip(np.split(whole, ends), division.specs, strict=True)
        matrices[~ref] = tuple(_put(part, mesh, spec) for part, spec in parts)
    vectors = {~ref: _put(x, mesh, WHOLE) for ref, x in _vectors(graph).items()}
    graph.weights.clear()
    graph.tables.clear()
    return Weights(matrices, vectors)


def load_tensors(weights: Weights, tensors: Sequence[torch.Tensor], mesh: Mesh) -> Weights:
    """Add the tensors that PyTorch modules read, replicated; frees the memory of parameters."""
    found: list[jax.Array] = []
    for tensor in tensors:
        kind = tensor.dtype if tensor.is_floating_point() else torch.int32
        kind = torch.float32 if kind == torch.float64 else kind
        found.append(_put(to_numpy(tensor.detach().to(kind, copy=True).contiguous()), mesh, WHOLE))
        if isinstance(tensor, torch.nn.Parameter) and tensor.dim():
            tensor.untyped_storage().resize_(0)
    return replace(weights, tensors=found)


def _put(part: np.ndarray, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    return jax.device_put(np.ascontiguousarray(part), NamedSharding(mesh, spec))


def _numbers(weight: LinearWeight, dtype: torch.dtype) -> np.ndarray:
    """Return a dequantised copy of type `dtype`; frees the memory of a torch parameter."""
    found = weight.load() if isinstance(weight, DeferredWeight) else weight
    if isinstance(found, QuantisedWeight):
        return to_numpy(found.numbers().to(dtype).contiguous())
    assert isinstance(found, torch.Tensor)
    copied = to_numpy(found.detach().to(dtype, copy=True).contiguous())
    if isinstance(weight, torch.Tensor):
        weight.untyped_storage().resize_(0)
    return copied


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """View the same memory as numpy; bfloat16 becomes JAX's type."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(jnp.bfloat16)
    return tensor.numpy()


def _vectors(graph: Graph) -> Mapping[int, np.ndarray]:
    """Float32 constants that ops read."""
    found: dict[int, np.ndarray] = {}
    for op in graph.ops:
        for part in buffers_of(op):
            constant = part.ref < 0 and part.element == "f32" and part.access == "read"
            if not constant or part.ref in found:
                continue
            if part.ref in graph.tables:
                found[part.ref] = _table(graph.tables[part.ref])
            elif (data := graph.constants[~part.ref]) is not None:
                found[part.ref] = data.view(np.float32).copy()
    return found


def _table(matrix: LinearWeight) -> np.ndarray:
    """Rows of an embedding table, padded to 32 columns as in programs."""
    rows = matrix.load() if isinstance(matrix, DeferredWeight) else matrix
    assert isinstance(rows, torch.Tensor)
    return F.pad(rows.detach().float(), (0, -rows.shape[1] % 32)).flatten().numpy()


def _expert_stacks(graph: Graph) -> set[int]:
    groups = {op.groups for op in graph.ops if isinstance(op, MoeAlign)}
    return {op.weight for op in graph.ops if isinstance(op, Linear) and op.groups in groups}


def _divisions(graph: Graph, count: int) -> Mapping[int, _Division]:
    """Derive how matrices that one op uses are sharded, from the ops around them."""
    used = Counter(op.weight for op in graph.ops if isinstance(op, Linear | Embed))
    makers: dict[int, Op] = {}
    found: dict[int, _Division] = {}
    for index, op in enumerate(graph.ops):
        if isinstance(op, Linear) and op.groups is None and used[op.weight] == 1:
            shape = graph.weights[op.weight].shape
            outputs = _by_reader(graph.ops[index + 1 :], op.out, shape[0], count)
            if outputs is not None:
                found[op.weight] = outputs
            elif _is_divided(makers.get(op.x), count):
                found[op.weight] = _Division((shape[0],), (_INPUTS,))
        for part in buffers_of(op):
            if part.access != "read" and part.ref >= 0:
                makers[part.ref] = op
    return found


def _by_reader(rest: list[Op], out: int, outputs: int, count: int) -> _Division | None:
    reader: Any = next((op for op in rest if _reads(op, out)), None)
    if isinstance(reader, RopeStore):
        sizes = head_sizes(reader.kv)
        heads = reader.kv.num_heads, reader.kv.num_kv_heads, reader.kv.num_kv_heads
    elif isinstance(reader, Glu):
        sizes = heads = (reader.cols, reader.cols)
    elif isinstance(reader, Activation):
        sizes = heads = (outputs,)
    else:
        return None
    if sum(sizes) != outputs:
        return None
    return _Division(sizes, tuple(WHOLE if n % count else _OUTPUTS for n in heads))


def _reads(op: Op, ref: int) -> bool:
    return any(part.ref == ref and part.access != "write" for part in buffers_of(op))


def _is_divided(maker: Op | None, count: int) -> bool:
    if isinstance(maker, Attention):
        return not maker.kv.num_heads % count
    return isinstance(maker, Glu | Activation) and not maker.cols % count

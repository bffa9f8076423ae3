"""The values of a program while JAX traces it: what op lowerings read and write.

Shapes: T rows of tokens, S rows of outputs, C columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from sylvan.kernels.native.graph import Graph
from sylvan.kernels.native.opset import KVPages, Source
from sylvan.kernels.native.schema import Op, RowType
from sylvan.kernels.xla.attention import Attend, Tiles

Array: TypeAlias = jax.Array
Pages = tuple[Array, Array | None]
"""Keys (P, K, page_size, D) and values (P, K, page_size, V) of a layer; None: part of the keys."""

DTYPES: Mapping[RowType, Any] = {"bf16": jnp.bfloat16, "f32": jnp.float32}


@dataclass(frozen=True, slots=True)
class StateRows:
    """Places of rows, and slots from and to which recurrent states go; int32. S or more: no slot.

    Attributes:
        starts: First row of each request (R,).
        counts: Rows of each request (R,); 0: padding.
        slots: State slot of each request (R,).
        saves: Slots that also get the state after each row (2, T).
        places: Number of each row in its request (T,).
        row_slots: State slot of each row's request (T,).
        single: Whether request n is row n.
    """

    starts: Array
    counts: Array
    slots: Array
    saves: Array
    places: Array
    row_slots: Array
    single: bool


@dataclass(frozen=True, slots=True)
class LoraStack:
    """The adapters of a layer in all slots L, their matrices padded with zeros to one rank R.

    Attributes:
        down: (E, K, L, P, R) of E experts (one of all other layers) and P parts.
        up: Of each part, (E, L, R, N).
        scales: Float32 (E, L, P).
    """

    down: Array
    up: tuple[Array, ...]
    scales: Array


@dataclass(frozen=True, slots=True)
class PaddedInputs:
    """Inputs of a step, padded to the sizes of a bucket.

    Attributes:
        sources: Ids, positions and token types, int32 (T,) each.
        slots: Where rows store keys and values, int32 (G, T), by KV group; 0.. are of page 0.
        tiles: Rows that attend, by KV group.
        sample_rows: Rows that need logits, int32 (S,).
        tokens: How many of the T rows are of requests, int32 ().
        state_rows: For recurrent layers.
        adapters: Adapter slot of each row, int32 (T,); -1: none.
        items: Which encoded item each row attends to, as its page, and how many vectors it has.
        edits: For each edit of the program vectors float32 (T, D), and which rows have one (T,).
    """

    sources: Mapping[Source, Array]
    slots: Array
    tiles: Sequence[Tiles]
    sample_rows: Array
    tokens: Array
    state_rows: StateRows | None = None
    adapters: Array | None = None
    items: Tiles | None = None
    edits: Sequence[tuple[Array, Array]] = ()


@dataclass(frozen=True, slots=True)
class Weights:
    """Constants of a program, by number; a matrix may be divided into parts along its outputs.

    Attributes:
        matrices: What products read.
        vectors: Float32 numbers.
        tensors: What modules of PyTorch read, see `sylvan.kernels.xla.tensors.Leaves`.
    """

    matrices: Mapping[int, tuple[Array, ...]]
    vectors: Mapping[int, Array]
    tensors: Sequence[Array] = ()


@dataclass(slots=True)
class Values:
    """Buffers of a program by number, while it is being traced.

    Attributes:
        pages: Pages of each attention layer, replaced when rows are stored.
        states: Slots of each part of the recurrent states (S, ...), which a step replaces.
        adapters: By the number of the constant that describes a layer's adapters.
        items: Keys and values of encoded items, by layer of the model.
        call: Runs a host call of the graph, by its number.
        loads: By the number of a constant, rows of each expert, int32 (E,).
    """

    graph: Graph
    weights: Weights
    step: PaddedInputs
    attend: Attend
    pages: dict[int, Pages]
    layers: Mapping[int, int]  # attention layer of the keys that are the constant
    states: dict[int, Array] = field(default_factory=dict[int, Array])
    adapters: Mapping[int, LoraStack] = field(default_factory=dict[int, LoraStack])
    items: Mapping[int, Pages] = field(default_factory=dict[int, Pages])
    call: Callable[[Values, int, Array], Array] | None = None
    buffers: dict[int, Any] = field(default_factory=dict[int, Any])
    loads: dict[int, Array] = field(default_factory=dict[int, Array])

    def rows(self, ref: int) -> Array:
        """A buffer of rows, whole."""
        found = self.buffers[ref]
        return jnp.concatenate(found, axis=-1) if isinstance(found, tuple) else found

    def wide(self, ref: int) -> Array:
        """The value in float32."""
        return self.rows(ref).astype(jnp.float32)

    def parts(self, ref: int, sizes: Sequence[int]) -> tuple[Array, ...]:
        """Columns of a buffer, divided."""
        found = self.buffers[ref]
        if isinstance(found, tuple) and [x.shape[-1] for x in found] == list(sizes):
            return found
        whole, ends = self.rows(ref), []
        for size in sizes[:-1]:
            ends.append((ends[-1] if ends else 0) + size)
        return tuple(jnp.split(whole, ends, axis=-1))

    def vector(self, ref: int, count: int) -> Array:
        """The first numbers of a constant."""
        return self.weights.vectors[~ref][:count]

    def optional(self, ref: int | None, count: int) -> Array | None:
        """The first numbers of a constant; None if it is absent."""
        return None if ref is None else self.vector(ref, count)

    def table(self, ref: int, cols: int) -> Array:
        """A constant of rows without padding, as many as there are."""
        flat = self.weights.vectors[~ref]
        count = flat.shape[0] // cols
        return flat[: count * cols].reshape(count, cols)

    def matrix(self, ref: int) -> tuple[Array, ...]:
        """The parts of a matrix (outputs, C), or of a stack of them."""
        return self.weights.matrices[~ref]

    def put(self, ref: int, value: Array, op: Op, *, wide: bool = False) -> None:
        """Keep rows in the type that the op writes."""
        self.buffers[ref] = value.astype(jnp.float32 if wide else DTYPES[op.dtype])

    def layer(self, kv: KVPages) -> int:
        """The attention layer with these pages."""
        return self.layers[~kv.keys]


def precision(dtype: Any) -> jax.lax.Precision:
    """Precision of products: by default, TPUs would compute float32 in bfloat16."""
    exact = dtype == jnp.float32
    return jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT

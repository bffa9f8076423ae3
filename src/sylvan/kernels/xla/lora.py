"""Lowerings of adapters: products with the matrices of all slots; each row keeps its slot's result.

Nothing is computed in steps without adapters. Shapes: T rows, L slots, P parts, R rank, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from sylvan.kernels.native.opset import (
    LoraExpand,
    LoraLookup,
    LoraPairs,
    LoraShrink,
    LoraTables,
    Source,
)
from sylvan.kernels.xla.values import LoraStack, Values, precision

Array: TypeAlias = jax.Array


@dataclass(frozen=True, slots=True)
class PairSlots:
    """Pairs of a row and an expert, sorted by expert: pairs per expert (E,), adapters (T K,)."""

    sizes: Array
    slots: Array


@dataclass(frozen=True, slots=True)
class Inner:
    """Rows between the two products, (T, L, P, R): zeros in all slots but the row's."""

    rows: Array
    slots: Array
    sizes: Array | None


def lora_pairs(v: Values, op: LoraPairs) -> None:
    """Give each pair the adapter of its row."""
    sizes = v.buffers[op.groups].sizes
    assert v.step.adapters is not None
    slots = v.step.adapters[v.buffers[op.sorted_pairs] // op.top_k]
    v.buffers[op.slot_rows] = PairSlots(sizes, slots)


def lora_shrink(v: Values, op: LoraShrink) -> None:
    """Rows times the first matrices."""
    slots, sizes = _slots(v, op.tables, op.rows)
    x, stack = v.rows(op.x), v.adapters[~op.tables.factors]

    v.buffers[op.inner] = shrink(x, stack, slots, sizes)


def shrink(x: Array, stack: LoraStack, slots: Array, sizes: Array | None = None) -> Inner:
    """Rows (T, K) times the first matrices; `slots` (T,) of their adapters, -1: none."""
    down = stack.down.reshape(*stack.down.shape[:2], -1)
    return _kept(lambda: _product(x, down, sizes), slots, sizes, stack, x.dtype)


def lora_lookup(v: Values, op: LoraLookup) -> None:
    """`lora_shrink` for ids: the first matrices are tables."""
    slots, sizes = _slots(v, op.tables, op.rows)
    stack, ids = v.adapters[~op.tables.factors], v.step.sources[Source.IDS]

    def found() -> Array:
        return stack.down[0][ids].astype(jnp.float32)

    v.buffers[op.inner] = _kept(found, slots, sizes, stack, stack.down.dtype)


def lora_expand(v: Values, op: LoraExpand) -> None:
    """Multiply by the second matrices and the scale, and add to the rows."""
    stack, inner = v.adapters[~op.tables.factors], v.buffers[op.inner]
    assert isinstance(inner, Inner)
    found = expand(v.parts(op.y, [up.shape[3] for up in stack.up]), stack, inner)
    v.buffers[op.y] = found[0] if len(found) == 1 else found


def expand(parts: Sequence[Array], stack: LoraStack, inner: Inner) -> tuple[Array, ...]:
    """Return the changed parts of the rows (T, N); each keeps its type."""
    found: list[Array] = []
    for part, (y, up) in enumerate(zip(parts, stack.up, strict=True)):

        def change(y: Array = y, up: Array = up, part: int = part) -> Array:
            rows = inner.rows[:, :, part].reshape(len(y), -1)
            whole = up.reshape(up.shape[0], -1, up.shape[3])
            return (y.astype(jnp.float32) + _product(rows, whole, inner.sizes)).astype(y.dtype)

        def leave(y: Array = y) -> Array:
            return y

        found.append(jax.lax.cond((inner.slots >= 0).any(), change, leave))
    return tuple(found)


def _slots(v: Values, tables: LoraTables, rows: str) -> tuple[Array, Array | None]:
    """Return the adapter of each row; for pairs, also the rows of each expert."""
    if tables.slot_rows >= 0:
        pairs = v.buffers[tables.slot_rows]
        assert isinstance(pairs, PairSlots)
        return pairs.slots, pairs.sizes
    assert v.step.adapters is not None
    return (v.step.adapters[v.step.sample_rows] if rows == "outputs" else v.step.adapters), None


def _kept(compute: Any, slots: Array, sizes: Array | None, stack: LoraStack, kind: Any) -> Inner:
    """Round to the type of the rows, then scale; zero all slots but the row's."""
    shape = slots.shape[0], *stack.down.shape[2:]

    def own() -> Array:
        rows = compute().reshape(shape).astype(kind).astype(jnp.float32)
        scales = stack.scales[_experts(sizes, shape[0])][..., None]
        mine = slots[:, None] == jnp.arange(shape[1], dtype=jnp.int32)
        return jnp.where(mine[:, :, None, None], rows * scales, 0.0)

    def nothing() -> Array:
        return jnp.zeros(shape, jnp.float32)

    return Inner(jax.lax.cond((slots >= 0).any(), own, nothing), slots, sizes)


def _experts(sizes: Array | None, rows: int) -> Array:
    """The expert of each row; 0 in layers without experts."""
    if sizes is None:
        return jnp.zeros(rows, jnp.int32)
    every = jnp.arange(sizes.shape[0], dtype=jnp.int32)
    return jnp.repeat(every, sizes, total_repeat_length=rows)


def _product(x: Array, stack: Array, sizes: Array | None) -> Array:
    """Rows times one matrix, or times the matrix of their expert; float32."""
    x = x.astype(jnp.promote_types(x.dtype, stack.dtype))
    stack = stack.astype(x.dtype)
    exact = precision(x.dtype)
    if sizes is None:
        return jnp.matmul(x, stack[0], precision=exact, preferred_element_type=jnp.float32)
    return jax.lax.ragged_dot(x, stack, sizes, precision=exact, preferred_element_type=jnp.float32)

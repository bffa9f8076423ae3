"""Lowerings of products by stacks of matrices: experts, and the heads of latent attention.

Shapes: T rows of the op, E experts, K experts of a row, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import jax
import jax.numpy as jnp

from sylvan.kernels.native.opset import Linear
from sylvan.kernels.xla.values import DTYPES, Values, precision

Array: TypeAlias = jax.Array


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """Rows in the order of their experts: `sizes` int32 (E,) of each, `experts` int32 (T K,)."""

    sizes: Array
    experts: Array


@dataclass(frozen=True, slots=True)
class HeadRows:
    """A matrix for each head: over columns of the same rows, or over rows head by head."""

    num_heads: int
    in_place: bool


def grouped(v: Values, op: Linear) -> None:
    """Each group of rows times its matrix of the stack."""
    assert op.groups is not None
    groups, (stack,) = v.buffers[op.groups], v.matrix(op.weight)
    if isinstance(groups, ExpertGroups):
        _by_expert(v, op, groups, stack)
    elif op.x_head_step:
        _in_place(v, op, groups, stack)
    else:
        x = v.rows(op.x).reshape(groups.num_heads, -1, op.cols)
        v.put(op.out, _heads("htk,hnk->htn", x, stack).reshape(-1, stack.shape[1]), op)


def _by_expert(v: Values, op: Linear, groups: ExpertGroups, stack: Array) -> None:
    """The stack is stored as (E, inputs, outputs), the layout of XLA's ragged product."""
    x = v.rows(op.x)
    out = jax.lax.ragged_dot(
        x,
        stack,
        groups.sizes,
        precision=precision(x.dtype),
        preferred_element_type=jnp.float32,
    )
    if op.bias is not None:
        width = -(-stack.shape[2] // 32) * 32
        biases = v.table(op.bias, width)[: stack.shape[0], : stack.shape[2]]
        out = out + biases[groups.experts]
    v.put(op.out, out, op, wide=op.out_f32)


def expert_product(x_PC: Array, stack_ENC: Array, experts_P: Array) -> Array:
    """See `kernels.experts.products.ExpertProduct`."""
    count = stack_ENC.shape[0]
    inside = (experts_P >= 0) & (experts_P < count)
    own = jnp.where(inside, experts_P, 0)
    order = jnp.argsort(own, stable=True)
    sizes = (own[:, None] == jnp.arange(count)).sum(0, dtype=jnp.int32)
    found = jax.lax.ragged_dot(
        x_PC[order],
        stack_ENC.swapaxes(1, 2),
        sizes,
        precision=precision(x_PC.dtype),
        preferred_element_type=jnp.float32,
    )
    found = found[jnp.argsort(order)].astype(x_PC.dtype)
    return jnp.where(inside[:, None], found, jnp.zeros((), x_PC.dtype))


def _in_place(v: Values, op: Linear, groups: HeadRows, stack: Array) -> None:
    """Heads are strided column ranges of x and of the output."""
    x, heads = v.rows(op.x), groups.num_heads
    step, made = op.x_head_step // DTYPES[op.dtype].dtype.itemsize, stack.shape[1]
    columns = x[:, : heads * step].reshape(-1, heads, step)[..., : op.cols]
    found = _heads("thk,hnk->thn", columns, stack).astype(x.dtype)
    known, width = v.buffers.get(op.out), heads * op.out_head_step
    if known is None:
        known = jnp.zeros((x.shape[0], width), x.dtype)
    before = known[:, :width].reshape(-1, heads, op.out_head_step)
    after = before.at[..., :made].set(found).reshape(-1, width)
    v.buffers[op.out] = jnp.concatenate((after, known[:, width:]), 1)


def _heads(how: str, x: Array, stack: Array) -> Array:
    return jnp.einsum(
        how, x, stack, precision=precision(x.dtype), preferred_element_type=jnp.float32
    )

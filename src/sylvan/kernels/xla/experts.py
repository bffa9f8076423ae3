"""Lowerings of ops on experts: routing, and rows in the order of their experts.

Shapes: T rows, E experts, K experts of a row, G groups of experts.
"""

from __future__ import annotations

from typing import TypeAlias

import jax
import jax.numpy as jnp

from sylvan.kernels.api import Unsupported
from sylvan.kernels.native.opset import ExpertSum, GatherRows, MoeAlign, Route, Scores
from sylvan.kernels.xla.grouped import ExpertGroups
from sylvan.kernels.xla.values import Values

Array: TypeAlias = jax.Array


def route(v: Values, op: Route) -> None:
    """Experts of each row, by rising number, and their weights."""
    if op.by_token is not None:
        raise Unsupported("experts by token have no lowering to JAX")
    logits = v.wide(op.logits)[:, : op.num_experts]
    if op.scores == Scores.SPARSEMIXER:
        experts, weights = _mixed(logits, op)
    elif op.scores == Scores.SOFTMAX_CHOSEN:
        experts = jnp.sort(jax.lax.top_k(logits, op.top_k)[1], -1)
        chosen = jnp.take_along_axis(logits, experts, -1)
        weights = jax.nn.softmax(chosen, -1) * op.scale
    else:
        experts, weights = _scored(logits, v.optional(op.bias, op.num_experts), op)
    v.buffers[op.experts], v.buffers[op.weights] = experts.astype(jnp.int32), weights


def _scored(logits: Array, bias: Array | None, op: Route) -> tuple[Array, Array]:
    if op.scores == Scores.SQRT_SOFTPLUS:
        scores = jnp.sqrt(jax.nn.softplus(logits))
    else:
        softmax = op.scores == Scores.SOFTMAX
        scores = jax.nn.softmax(logits, -1) if softmax else jax.nn.sigmoid(logits)
    rank = scores if bias is None else scores + bias
    if op.groups > 1:
        rank = _of_best_groups(rank, op)
    experts = jnp.sort(jax.lax.top_k(rank, op.top_k)[1], -1)
    weights = jnp.take_along_axis(scores, experts, -1)
    if op.normalise:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return experts, weights * op.scale


def _of_best_groups(rank_TE: Array, op: Route) -> Array:
    """Mask experts outside of the best groups."""
    size = op.num_experts // op.groups
    by_group = rank_TE.reshape(-1, op.groups, size)
    best = jax.lax.top_k(by_group, min(op.group_rank, size))[0].sum(-1)
    kept = jax.lax.top_k(best, op.kept_groups)[1]
    is_kept = jax.nn.one_hot(kept, op.groups, dtype=jnp.bool_).any(1)
    return jnp.where(is_kept[..., None], by_group, -jnp.inf).reshape(rank_TE.shape)


def _mixed(logits: Array, op: Route) -> tuple[Array, Array]:
    """SparseMixer: pick the best expert, then the next; weigh each against scores close to it."""
    rank, found = logits, []
    for _ in range(op.top_k):
        best = jnp.argmax(rank, -1)[:, None]
        top = jnp.take_along_axis(rank, best, -1)
        far = (top - logits) / jnp.maximum(jnp.abs(logits), top) > 2 * op.jitter
        near = jnp.where(~far & (rank > -jnp.inf), jnp.exp(rank - top), 0.0)
        found.append((best, 1.0 / near.sum(-1, keepdims=True)))
        rank = jnp.where(jnp.arange(op.num_experts) == best, -jnp.inf, rank)
    experts, weights = (jnp.concatenate(parts, -1) for parts in zip(*found, strict=True))
    order = jnp.argsort(experts, -1)
    return jnp.take_along_axis(experts, order, -1), jnp.take_along_axis(weights, order, -1)


def moe_align(v: Values, op: MoeAlign) -> None:
    """Orders the pairs of a row and an expert by expert, then by row."""
    experts = v.buffers[op.experts]
    pairs = experts.reshape(-1)
    order = jnp.argsort(pairs, stable=True).astype(jnp.int32)
    every = jnp.arange(op.num_experts, dtype=jnp.int32)
    sizes = (pairs[:, None] == every).sum(0, dtype=jnp.int32)
    own = jnp.arange(experts.shape[0]) < v.step.tokens  # others are padding
    counted = ((experts[..., None] == every) & own[:, None, None]).sum((0, 1), dtype=jnp.int32)
    v.loads[~op.load] = counted
    v.buffers[op.sorted_pairs] = order
    v.buffers[op.pair_places] = jnp.argsort(order).astype(jnp.int32)
    v.buffers[op.groups] = ExpertGroups(sizes, pairs[order])


def gather_rows(v: Values, op: GatherRows) -> None:
    """Rows of x for the sorted pairs, each times the weight of its pair if weights are given."""
    pairs = v.buffers[op.sorted_pairs]
    rows = v.rows(op.x)[pairs // op.top_k]
    if op.weights is not None:
        rows = rows.astype(jnp.float32) * v.buffers[op.weights].reshape(-1)[pairs, None]
    v.put(op.out, rows, op)


def expert_sum(v: Values, op: ExpertSum) -> None:
    """Sum a row's expert outputs, weighted."""
    rows = v.wide(op.x)[v.buffers[op.pair_places]]
    rows = rows.reshape(-1, op.top_k, rows.shape[-1])
    if op.weights is not None:
        rows = rows * v.buffers[op.weights].reshape(-1, op.top_k)[..., None]
    v.put(op.out, rows.sum(1), op)

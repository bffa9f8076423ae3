"""Lowerings of attention: norms and rotary positions of heads, the store, latent rows.

Shapes: T rows, H heads, D columns of a head.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TypeAlias

import jax
import jax.numpy as jnp

from sylvan.kernels.api import BlockPattern
from sylvan.kernels.native.opset import (
    Attention,
    FromStack,
    HeadGroups,
    KVPages,
    LatentRows,
    PageFormat,
    RopeStore,
    Source,
    ToStack,
)
from sylvan.kernels.xla.attention import Biases, HeadSpec, softmax, store
from sylvan.kernels.xla.grouped import HeadRows
from sylvan.kernels.xla.values import DTYPES, Values

Array: TypeAlias = jax.Array


def rope_store(v: Values, op: RopeStore) -> None:
    """Norms and rotary positions of query and key heads; keys and values go into their pages."""
    q, k, value = v.parts(op.qkv, head_sizes(op.kv))
    q_weight = _norm_weight(v, op.q_norm, op.kv.num_heads, op.kv, whole=op.q_norm_whole)
    k_weight = _norm_weight(v, op.k_norm, op.kv.num_kv_heads, op.kv, whole=op.k_norm_whole)
    q = _prepared(v, op, _heads(q, op.kv.head_dim), q_weight, op.q_eps)
    k = _prepared(v, op, _heads(k, op.kv.head_dim), k_weight, op.k_eps)
    if op.q_scales is not None:
        scales = v.weights.vectors[~op.q_scales][v.step.sources[Source.POSITIONS]]
        q = (q.astype(jnp.float32) * scales[:, None, None]).astype(q.dtype)
    v.buffers[op.qkv] = q.reshape(q.shape[0], -1), k.reshape(k.shape[0], -1), value
    if op.kv.whole_text:
        return
    layer, slots = v.layer(op.kv), v.step.slots[op.kv.table]
    keys, values = v.pages[layer]
    keys = store(keys, slots, k)
    if values is not None:
        values = store(values, slots, _heads(value, op.kv.value_dim))
    v.pages[layer] = keys, values


def head_sizes(kv: KVPages) -> tuple[int, int, int]:
    """Columns of queries, keys and values in a row."""
    keys = kv.num_kv_heads * kv.head_dim
    return kv.num_heads * kv.head_dim, keys, kv.num_kv_heads * kv.value_dim


def _heads(x: Array, size: int) -> Array:
    return x.reshape(x.shape[0], -1, size)


def _norm_weight(
    v: Values, ref: int | None, heads: int, kv: KVPages, *, whole: bool
) -> Array | None:
    """Norm weights of a head (D,), or of all heads (H, D)."""
    if ref is None:
        return None
    if whole:
        return v.vector(ref, heads * kv.head_dim).reshape(heads, kv.head_dim)
    return v.vector(ref, kv.head_dim)


def _prepared(v: Values, op: RopeStore, x_THD: Array, weight: Array | None, eps: float) -> Array:
    """Heads with their norm and rotary position; rounded between them where the norm is last."""
    dtype = x_THD.dtype
    x = x_THD.astype(jnp.float32)
    if not op.norm_last:
        x = _head_norm(x, weight, eps)
    if op.cos_sin is not None:
        table = v.table(op.cos_sin, op.rotary_dim)
        x = rotate(x, table[v.step.sources[Source.POSITIONS]], interleaved=op.interleaved)
    if op.norm_last and weight is not None:
        x = _head_norm(x.astype(dtype).astype(jnp.float32), weight, eps)
    return x.astype(dtype)


def _head_norm(x_THD: Array, weight: Array | None, eps: float) -> Array:
    if weight is None:
        return x_THD
    over = (-2, -1) if weight.ndim == 2 else -1  # all heads at once
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x_THD), over, keepdims=True) + eps)
    return x_THD * inverse * weight


def rotate(x_THD: Array, table_TR: Array, *, interleaved: bool) -> Array:
    """Apply rotary embedding to the first columns of every head; float32 in and out."""
    dim = table_TR.shape[1]
    cos, sin = jnp.split(table_TR[:, None], 2, -1)
    rotary, passing = x_THD[..., :dim], x_THD[..., dim:]
    if interleaved:
        a, b = rotary[..., ::2], rotary[..., 1::2]
        rotated = jnp.stack((a * cos - b * sin, b * cos + a * sin), -1).reshape(rotary.shape)
    else:
        a, b = jnp.split(rotary, 2, -1)
        rotated = jnp.concatenate((a * cos - b * sin, b * cos + a * sin), -1)
    return jnp.concatenate((rotated, passing), -1)


def attention(v: Values, op: Attention) -> None:
    """Queries over the pages of their requests, or over the texts of the step."""
    kv = op.kv
    spec = HeadSpec(
        num_heads=kv.num_heads,
        num_kv_heads=kv.num_kv_heads,
        head_dim=kv.head_dim,
        value_dim=kv.value_dim,
        scale=op.scale,
        window=op.window,
        chunk=op.chunk,
        softcap=op.softcap,
        blocks=BlockPattern(**asdict(op.blocks)) if op.blocks.size else None,
    )
    biases = Biases(
        v.optional(op.sinks, kv.num_heads),
        v.optional(op.slopes, kv.num_heads),
        None if op.biases is None else v.table(op.biases, op.distances)[: kv.num_heads],
        spec.blocks and jnp.array(spec.blocks.shifts(kv.num_heads), jnp.int32),
    )
    q, k, value = v.parts(op.qkv, head_sizes(kv))
    q = _heads(q, kv.head_dim)
    if kv.whole_text:
        out = _whole_texts(v, (q, _heads(k, kv.head_dim), _heads(value, kv.value_dim)), spec)
    else:
        keys, values = v.pages[v.layer(kv)]
        tiles = v.step.tiles[kv.table]
        shared = kv.format == PageFormat.SHARED
        found = v.attend(tiles.gather(q), keys, None if shared else values, tiles, spec, biases)
        out = tiles.scatter(found, q.shape[0])
    v.put(op.out, out.reshape(out.shape[0], -1), op)


def _whole_texts(v: Values, heads: tuple[Array, Array, Array], spec: HeadSpec) -> Array:
    """Every token sees its whole text, within the window on both sides."""
    q, k, value = heads
    rows = q.shape[0]
    own = starts = jnp.arange(rows, dtype=jnp.int32)  # where each row's text starts
    tiles = v.step.tiles[0]
    if tiles.rows is not None:
        found = (tiles.rows - tiles.places).reshape(-1)
        starts = jnp.zeros(rows, jnp.int32).at[tiles.rows.reshape(-1)].set(found, mode="drop")
    there = own < v.step.tokens
    seen = (starts[:, None] == starts) & there
    if spec.window:
        seen &= jnp.abs(own[:, None] - own) < spec.window
    q = q.reshape(rows, spec.num_kv_heads, spec.group, spec.head_dim)
    exact = jax.lax.Precision.HIGHEST
    q, k, value = (x.astype(jnp.float32) for x in (q, k, value))
    scores = jnp.einsum("tkgd,skd->kgts", q, k, precision=exact) * spec.scale
    if spec.softcap:
        scores = spec.softcap * jnp.tanh(scores / spec.softcap)
    weights = softmax(jnp.where(seen, scores, -jnp.inf), None)
    out = jnp.einsum("kgts,skv->tkgv", weights, value, precision=exact)
    return out.reshape(rows, spec.num_heads, spec.value_dim)


def latent_rows(v: Values, op: LatentRows) -> None:
    """Rotated columns of queries, and the one key and its value; see `LatentRows`."""
    dtype, heads = DTYPES[op.dtype], op.num_heads
    nope, rope_dim, latent = op.qk_nope_head_dim, op.qk_rope_head_dim, op.kv_lora_rank
    q = v.wide(op.q).reshape(-1, heads, nope + rope_dim)
    kv = v.wide(op.kv)
    rotary, key = q[..., nope:], kv[:, None, latent:]
    if op.cos_sin is not None:
        table = v.table(op.cos_sin, rope_dim)[v.step.sources[Source.POSITIONS]]
        rotary, key = (rotate(x, table, interleaved=op.interleaved) for x in (rotary, key))
    rotated = rotary.astype(dtype)
    queries = jnp.concatenate((jnp.zeros((*rotated.shape[:2], latent), dtype), rotated), -1)
    value = _head_norm(kv[:, None, :latent], v.vector(op.norm, latent), op.eps)[:, 0]
    parts = queries.reshape(queries.shape[0], -1), value, key[:, 0], value
    v.buffers[op.out] = jnp.concatenate([part.astype(dtype) for part in parts], -1)


def head_groups(v: Values, op: HeadGroups) -> None:
    """Mark the following products as one matrix per head."""
    v.buffers[op.groups] = HeadRows(op.num_heads, op.in_place)


def to_stack(v: Values, op: ToStack) -> None:
    """Heads of rows as one row each, head by head."""
    x = v.rows(op.x)
    heads = [x[:, h * op.step : h * op.step + op.width] for h in range(op.num_heads)]
    v.buffers[op.stack] = jnp.concatenate(heads, 0)


def from_stack(v: Values, op: FromStack) -> None:
    """Inverse of `to_stack`; other columns stay unchanged."""
    stack = v.rows(op.stack)[:, : op.width]
    stack = stack.reshape(op.num_heads, -1, op.width)
    out = v.buffers.get(op.out)
    if out is None:
        out = jnp.zeros((stack.shape[1], op.cols), stack.dtype)
    for head in range(op.num_heads):
        out = out.at[:, head * op.step : head * op.step + op.width].set(stack[head])
    v.buffers[op.out] = out

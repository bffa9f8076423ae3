"""Traces latent attention: the ops before and after paged attention.

Shapes: T rows, N heads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from sylvan.kernels.api import LatentParts, TracedTensor, Unsupported
from sylvan.kernels.matmul.weights import DeferredWeight
from sylvan.kernels.native.builder import ProgramBuilder
from sylvan.kernels.native.heads import HeadProducts
from sylvan.kernels.native.opset import LatentRows


def trace_latent(
    builder: ProgramBuilder,
    projected: tuple[TracedTensor, TracedTensor],
    parts: LatentParts,
    attend: Callable[[TracedTensor], TracedTensor],
) -> TracedTensor:
    """Trace `latent_attention`; `attend` traces attention over heads, a key and a value."""
    shape, (q, kv) = parts.shape, projected
    builder.expect(q, "latent attention")
    builder.expect(kv, "latent attention")
    table = None if parts.rope is None else parts.rope.cos_sin
    if table is not None and (table.shape[1] != shape.rope_dim or shape.rope_dim % 2):
        raise Unsupported(f"a rotary table of {table.shape[1]} columns for {shape.rope_dim}")
    dim, heads = shape.latent + shape.rope_dim, shape.num_heads
    rows = builder.new((heads + 1) * dim + shape.latent)
    op = LatentRows(
        q=q.id,
        kv=kv.id,
        cos_sin=None if table is None else builder.vector(table),
        norm=builder.vector(parts.norm.weight, parts.norm.offset),
        out=rows.id,
        num_heads=heads,
        qk_nope_head_dim=shape.nope,
        qk_rope_head_dim=shape.rope_dim,
        kv_lora_rank=shape.latent,
        interleaved=parts.rope is not None and parts.rope.interleaved,
        eps=parts.norm.eps,
    )
    builder.emit(op, rows)
    products = HeadProducts(builder, rows, heads, (shape.nope, shape.latent, shape.value))
    keys_up, values_up = _stacks(parts)
    products.multiply((q, shape.nope + shape.rope_dim), keys_up, (rows, dim))
    found, out = attend(rows), builder.new(heads * shape.value)
    products.multiply((found, shape.latent), values_up, (out, shape.value))
    return out


def _stacks(parts: LatentParts) -> tuple[DeferredWeight, DeferredWeight]:
    """Matrices of queries to latents (N, latent, nope), and latents to values (N, value, latent).

    Both are made of one matrix, which is read once.
    """
    shape, up = parts.shape, parts.up
    kept: list[torch.Tensor] = []

    def whole() -> torch.Tensor:
        found = kept.pop() if kept else up.load() if isinstance(up, DeferredWeight) else up
        if not isinstance(found, torch.Tensor):
            raise Unsupported("quantised up-projections of latent attention")
        return by_heads(found)

    def to_latents(found: torch.Tensor) -> torch.Tensor:
        return found[:, : shape.nope].transpose(1, 2).contiguous()

    def of_latents(found: torch.Tensor) -> torch.Tensor:
        return found[:, shape.nope :].contiguous()

    def by_heads(up: torch.Tensor) -> torch.Tensor:
        return up.detach().unflatten(0, (shape.num_heads, -1))

    def keys() -> torch.Tensor:
        found = whole()
        kept.append(found.flatten(0, 1))
        return to_latents(found)

    name = up.key if isinstance(up, DeferredWeight) else str(id(up))
    sizes = shape.num_heads, shape.latent, shape.nope
    keys_up = DeferredWeight(
        torch.Size(sizes), keys, f"{name} to latents", (up, lambda w: to_latents(by_heads(w)))
    )
    sizes = shape.num_heads, shape.value, shape.latent
    return keys_up, DeferredWeight(
        torch.Size(sizes),
        lambda: of_latents(whole()),
        f"{name} of latents",
        (up, lambda w: of_latents(by_heads(w))),
    )

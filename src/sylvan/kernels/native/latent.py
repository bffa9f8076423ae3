"""Traces latent attention: its ops around the paged one.

Shapes: T rows, N heads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from sylvan.kernels.api import LatentParts, LinearWeight, TracedTensor, Unsupported
from sylvan.kernels.matmul.weights import DeferredWeight
from sylvan.kernels.native.builder import ProgramBuilder, padded
from sylvan.kernels.native.experts import GROUP_ROWS
from sylvan.kernels.native.opset import FromStack, HeadGroups, LatentRows, ToStack


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
    in_place = all(width == padded(width) for width in (shape.nope, shape.latent, shape.value))
    groups = head_groups(builder, rows, heads, in_place=in_place)
    multiply = _linear_in_place if in_place else linear_by_stacks
    keys_up, values_up = _stacks(parts)
    multiply(builder, (q, shape.nope + shape.rope_dim), keys_up, (rows, dim), groups)
    found, out = attend(rows), builder.new(heads * shape.value)
    multiply(builder, (found, shape.latent), values_up, (out, shape.value), groups)
    return out


def head_groups(builder: ProgramBuilder, rows: TracedTensor, heads: int, *, in_place: bool) -> int:
    """Emit the groups of rows of products with a matrix per head; see `HeadGroups`."""
    most = heads * (1 + builder.num_rows("tokens") // GROUP_ROWS)
    groups = builder.graph.buffer((1 + 3 * most) * 4)
    builder.emit(HeadGroups(groups=groups, num_heads=heads, in_place=in_place), rows)
    return groups


def _linear_in_place(
    builder: ProgramBuilder,
    x: tuple[TracedTensor, int],
    stack: DeferredWeight,
    out: tuple[TracedTensor, int],
    groups: int,
) -> None:
    """Multiply each head of x by its own matrix, into heads of out; strides in columns."""
    builder.linear_heads(x[0], stack, out[0], groups, (x[1], out[1]))


def linear_by_stacks(
    builder: ProgramBuilder,
    x: tuple[TracedTensor, int],
    stack: LinearWeight,
    out: tuple[TracedTensor, int],
    groups: int,
) -> None:
    """As above, for heads of any number of columns; `groups` are not `in_place`."""
    heads, made, read = stack.shape
    rows = builder.repeated(read, builder.dtype, "tokens", heads)
    op = ToStack(x=x[0].id, stack=rows.id, num_heads=heads, width=read, step=x[1], cols=x[0].cols)
    builder.emit(op, x[0])
    product = builder.linear(rows, stack, None, groups=groups)
    back = FromStack(
        stack=product.id, out=out[0].id, num_heads=heads, width=made, step=out[1], cols=out[0].cols
    )
    builder.emit(back, out[0])


def _stacks(parts: LatentParts) -> tuple[DeferredWeight, DeferredWeight]:
    """Matrices of queries to latents (N, latent, nope), and latents to values (N, value, latent).

    Both are made of one matrix, which is read once.
    """
    shape, up = parts.shape, parts.up
    kept: list[torch.Tensor] = []

    def whole() -> torch.Tensor:
        found = kept.pop() if kept else up.load() if isinstance(up, DeferredWeight) else up
        if not isinstance(found, torch.Tensor):
            raise Unsupported("quantised up-projections of latents")
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

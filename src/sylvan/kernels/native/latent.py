"""Notes latent attention as native ops around the paged one.

Shapes: T rows, N heads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from sylvan.kernels.api import LatentParts, Unsupported, Value
from sylvan.kernels.matmul.weights import DeferredWeight
from sylvan.kernels.native.binding import Kind
from sylvan.kernels.native.plan import Ref
from sylvan.kernels.native.sheet import Sheet, padded

_GROUP_ROWS = 128  # a group of rows has at most so many, or more: see LINEAR_ROWS


def record_latent(
    sheet: Sheet,
    projected: tuple[Value, Value],
    parts: LatentParts,
    attend: Callable[[Value], Value],
) -> Value:
    """What `latent_attention` does; `attend` notes attention over heads, a key and a value."""
    shape, (q, kv) = parts.shape, projected
    sheet.expect(q, "latent attention")
    sheet.expect(kv, "latent attention")
    table = parts.rope.cos_sin
    if table.shape[1] != shape.turning or shape.turning % 2:
        raise Unsupported(f"a rotary table of {table.shape[1]} columns for {shape.turning}")
    dim, heads = shape.latent + shape.turning, shape.num_heads
    rows = sheet.new((heads + 1) * dim + shape.latent)
    norm = sheet.vector(parts.norm.weight, parts.norm.offset)
    buffers = q.id, kv.id, sheet.vector(table), norm, rows.id
    sizes = heads, shape.nope, shape.turning, shape.latent, int(parts.rope.interleaved)
    sheet.note(Kind.LATENT_ROWS, rows, buffers, sizes, (parts.norm.eps,))
    most = heads * (1 + sheet.num_rows("tokens") // _GROUP_ROWS)
    groups = sheet.draft.buffer((1 + 3 * most) * 4)
    in_place = all(width == padded(width) for width in (shape.nope, shape.latent, shape.value))
    sheet.note(Kind.HEAD_GROUPS, rows, (groups,), (heads, int(in_place)))
    multiply = _multiply_in_place if in_place else _multiply_stacks
    keys_up, values_up = _stacks(parts)
    multiply(sheet, (q, shape.nope + shape.turning), keys_up, (rows, dim), groups)
    found, out = attend(rows), sheet.new(heads * shape.value)
    multiply(sheet, (found, shape.latent), values_up, (out, shape.value), groups)
    return out


def _multiply_in_place(
    sheet: Sheet, x: tuple[Value, int], stack: DeferredWeight, out: tuple[Value, int], groups: Ref
) -> None:
    """Heads of x, so many columns apart, times a matrix each, into heads of out."""
    sheet.multiply_heads(x[0], sheet.weight(stack), out[0], groups, (x[1], out[1]))


def _multiply_stacks(
    sheet: Sheet, x: tuple[Value, int], stack: DeferredWeight, out: tuple[Value, int], groups: Ref
) -> None:
    """The same for heads of any columns."""
    heads, made, read = stack.shape
    rows = _to_stack(sheet, x[0], (heads, read, x[1]))
    product = sheet.multiply(rows, sheet.weight(stack), None, groups=groups)
    _from_stack(sheet, product, out[0], (heads, made, out[1]))


def _to_stack(sheet: Sheet, rows: Value, sizes: tuple[int, int, int]) -> Value:
    heads, width, _ = sizes
    stack = sheet.repeated(width, sheet.dtype, "tokens", heads)
    sheet.note(Kind.TO_STACK, rows, (rows.id, stack.id), (*sizes, rows.cols))
    return stack


def _from_stack(sheet: Sheet, stack: Value, rows: Value, sizes: tuple[int, int, int]) -> None:
    buffers: tuple[Ref, ...] = (stack.id, rows.id)
    sheet.note(Kind.FROM_STACK, rows, buffers, (*sizes, rows.cols))


def _stacks(parts: LatentParts) -> tuple[DeferredWeight, DeferredWeight]:
    """What makes latents of queries (N, latent, nope), and values of latents (N, value, latent).

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

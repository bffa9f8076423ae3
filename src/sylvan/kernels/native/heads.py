"""Traces products of each head of rows, or group of columns, with a matrix of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sylvan.kernels.api import LinearWeight, TracedTensor, Unsupported
from sylvan.kernels.matmul.weights import DeferredWeight
from sylvan.kernels.native.builder import ProgramBuilder, padded
from sylvan.kernels.native.experts import GROUP_ROWS
from sylvan.kernels.native.opset import FromStack, HeadGroups, ToStack


class HeadProducts:
    """Products over `count` heads of rows like `like`, of heads of `widths` columns.

    Heads of whole tiles are read and written where they lie, others through a stack of rows.
    """

    def __init__(
        self, builder: ProgramBuilder, like: TracedTensor, count: int, widths: Sequence[int]
    ) -> None:
        self._builder, self._count = builder, count
        most = count * (1 + builder.num_rows("tokens") // GROUP_ROWS)
        self._groups = builder.graph.buffer((1 + 3 * most) * 4)
        self._in_place = all(width == padded(width) for width in widths)
        op = HeadGroups(groups=self._groups, num_heads=count, in_place=self._in_place)
        builder.emit(op, like)

    def multiply(
        self,
        x: tuple[TracedTensor, int],
        stack: LinearWeight,
        out: tuple[TracedTensor, int],
    ) -> None:
        """Multiply each head of x by its matrix, into heads of out; strides in columns."""
        builder = self._builder
        if self._in_place:
            builder.linear_heads(x[0], stack, out[0], self._groups, (x[1], out[1]))
            return
        heads, made, read = stack.shape
        rows = builder.repeated(read, builder.dtype, "tokens", heads)
        op = ToStack(
            x=x[0].id, stack=rows.id, num_heads=heads, width=read, step=x[1], cols=x[0].cols
        )
        builder.emit(op, x[0])
        product = builder.linear(rows, stack, None, groups=self._groups)
        back = FromStack(
            stack=product.id,
            out=out[0].id,
            num_heads=heads,
            width=made,
            step=out[1],
            cols=out[0].cols,
        )
        builder.emit(back, out[0])


def trace_grouped_linear(
    builder: ProgramBuilder, x: TracedTensor, weight: LinearWeight, groups: int
) -> TracedTensor:
    """Trace `grouped_linear`."""
    builder.expect(x, "a product of groups of columns")
    if x.rows != "tokens" or x.cols != groups * weight.shape[1]:
        raise Unsupported(f"a product of {groups} groups of {x.cols} columns")
    inputs, outputs = weight.shape[1], weight.shape[0] // groups
    out = builder.new(groups * outputs, None, x)
    products = HeadProducts(builder, x, groups, (inputs, outputs))
    products.multiply((x, inputs), _stack_of(weight, groups), (out, outputs))
    return out


def _stack_of(weight: LinearWeight, groups: int) -> DeferredWeight:
    """Matrices of the groups (G, R, F)."""

    def divided(found: torch.Tensor) -> torch.Tensor:
        return found.detach().unflatten(0, (groups, -1))

    def load() -> torch.Tensor:
        found = weight.load() if isinstance(weight, DeferredWeight) else weight
        if not isinstance(found, torch.Tensor):
            raise Unsupported("a quantised matrix for each group of columns")
        return divided(found)

    name = weight.key if isinstance(weight, DeferredWeight) else str(id(weight))
    size = torch.Size((groups, weight.shape[0] // groups, weight.shape[1]))
    return DeferredWeight(size, load, f"{name} by groups", (weight, divided))

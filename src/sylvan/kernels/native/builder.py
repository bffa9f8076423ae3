"""Builds the graph of a program while a model is traced: emits ops, names values and weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
from torch.nn import functional as F

from sylvan.kernels.api import (
    ActivationKind,
    Clamping,
    Dtype,
    LinearWeight,
    Rows,
    TracedTensor,
    Tracer,
    Unsupported,
)
from sylvan.kernels.matmul.pack import as_bytes, check_packable
from sylvan.kernels.matmul.weights import DeferredWeight
from sylvan.kernels.native.binding import Constants
from sylvan.kernels.native.copies import VectorCopy
from sylvan.kernels.native.graph import Graph, ProgramLimits
from sylvan.kernels.native.opset import ClampForm, Function, Glu, Linear
from sylvan.kernels.native.schema import BufferRef, Op

MAX_PARTS = 8
"""Maximum number of equal input parts of a product, summed over a tree; see `PART_LEVELS`."""
ELEMENT_BYTES: Mapping[str, int] = MappingProxyType({"f32": 4, "bf16": 2, "i32": 4})


def padded(cols: int) -> int:
    """Number of columns of a row in memory."""
    return -(-cols // 32) * 32


def function_of(kind: ActivationKind) -> Function:
    """Return the library's function for an activation."""
    return Function[kind.upper()]


def glu_of(
    gate_up: TracedTensor,
    out: TracedTensor,
    kind: ActivationKind,
    clamping: Clamping | None,
    *,
    groups: BufferRef = None,
) -> Glu:
    """The op of a gated activation."""
    limit, form, alpha = clamping or (0.0, "none", 1.0)
    return Glu(
        gate_up=gate_up.id,
        groups=groups,
        out=out.id,
        cols=out.cols,
        function=function_of(kind),
        clamp=ClampForm[form.upper()],
        alpha=alpha,
        limit=limit,
    )


class ProgramBuilder:
    """Helper with which a tracer emits ops; values belong to `tracer`.

    The model stays unchanged: weights are packed later, by a pass over the graph.
    """

    def __init__(
        self, tracer: Tracer, dtype: torch.dtype, limits: ProgramLimits, constants: Constants
    ) -> None:
        if dtype not in (torch.bfloat16, torch.float32):
            raise Unsupported(f"rows of {dtype}")
        self.graph = Graph(limits, dtype)
        self.constants = constants
        self.dtype: Dtype = "bf16" if dtype == torch.bfloat16 else "f32"
        self.segment = 0
        self._tracer = tracer
        self._weights: dict[object, tuple[LinearWeight, int]] = {}
        self._vectors: dict[tuple[int, float], tuple[object, int]] = {}

    def new(
        self, cols: int, dtype: Dtype | None = None, like: TracedTensor | None = None
    ) -> TracedTensor:
        """Create a value with the rows of `like` (the step's tokens), in the model's dtype."""
        rows, times = (like.rows, like.times) if like else ("tokens", 1)
        return self.repeated(cols, dtype or self.dtype, rows, times)

    def repeated(self, cols: int, dtype: Dtype, rows: Rows, times: int) -> TracedTensor:
        """Create a value with `times` rows for each of `rows`."""
        size = self.num_rows(rows, times) * padded(cols) * ELEMENT_BYTES[dtype]
        return TracedTensor(self._tracer, self.graph.buffer(size), cols, dtype, rows, times)

    def num_rows(self, rows: Rows, times: int = 1) -> int:
        return self.graph.limits.max_rows(rows, times)

    def emit(self, op: Op, like: TracedTensor, *, dtype: Dtype | None = None) -> None:
        """Add an op over the rows of `like`; its "row" buffers are of `dtype` (that of `like`)."""
        row_type = dtype or like.dtype
        assert row_type != "i32"
        header = {"rows": like.rows, "times": like.times, "segment": self.segment}
        self.graph.ops.append(replace(op, dtype=row_type, **header))

    def expect(self, x: TracedTensor, op: str) -> None:
        """Reject rows that are not of the model's dtype."""
        if x.dtype != self.dtype:
            raise Unsupported(f"{op} of {x.dtype} rows in a {self.dtype} program")

    def is_wide(self, x: TracedTensor) -> bool:
        """Whether rows are float32 although the program's rows have another type."""
        return x.dtype == "f32" != self.dtype

    def vector(self, vector: torch.Tensor, offset: float = 0.0) -> int:
        """Add a float32 copy of a vector or table, padded with zeros to whole rows."""
        key = id(vector), offset
        if key not in self._vectors:
            values = vector.detach().float().flatten() + offset
            data = as_bytes(F.pad(values, (0, padded(len(values)) + 32 - len(values))))
            ref = self.graph.constant(data)
            self._vectors[key] = vector, ref  # keeps `vector` alive, so its id stays its own
            self.graph.copies.append(VectorCopy(vector, data, vector.shape, 0, offset))
        return self._vectors[key][1]

    def table(self, matrix: LinearWeight) -> int:
        """Add float32 rows of a matrix, each padded: the biases of a stack."""
        ref = self.graph.constant(None)
        self.graph.tables[ref] = matrix
        return ref

    def weight(self, weight: LinearWeight) -> int:
        """Add a weight or, with three dimensions, a stack of weights; equal ones are packed once.

        Raises:
            Unsupported: a format without a kernel.
        """
        key = weight.key if isinstance(weight, DeferredWeight) else id(weight)
        if key not in self._weights:
            check_packable(weight)
            ref = self.graph.constant(None)
            self.graph.weights[ref] = weight
            self._weights[key] = weight, ref  # keeps `weight` alive, so its id stays its own
        return self._weights[key][1]

    def linear(
        self,
        x: TracedTensor,
        weight: LinearWeight,
        bias: int | None,
        *,
        out_f32: bool = False,
        groups: int | None = None,
        parts: int = 1,
    ) -> TracedTensor:
        """Emit rows of x times a weight; with `groups`, each group of rows times its matrix.

        See `ops.linear` for `parts`.
        """
        self.expect(x, "a linear")
        outputs, cols = weight.shape[-2:]
        if parts > 1 and (cols % (32 * parts) or parts > MAX_PARTS):
            raise Unsupported(f"a product over {cols} inputs in {parts} parts")
        if cols != x.cols:
            raise Unsupported(f"a linear of {cols} inputs on rows of {x.cols}")
        out = self.new(outputs, "f32" if out_f32 else self.dtype, x)
        op = Linear(
            x=x.id,
            weight=self.weight(weight),
            bias=bias,
            out=out.id,
            groups=groups,
            cols=cols,
            outputs=padded(outputs),
            out_f32=out.dtype == "f32" != self.dtype,
            x_bytes=padded(x.cols) * ELEMENT_BYTES[self.dtype],
            out_stride=padded(outputs),
            parts=parts,
        )
        self.emit(op, out, dtype=self.dtype)
        return out

    def linear_heads(
        self,
        x: TracedTensor,
        weight: LinearWeight,
        out: TracedTensor,
        groups: int,
        steps: tuple[int, int],
    ) -> None:
        """Emit each head's columns of x times its matrix, into its columns of out.

        Heads begin every `steps` columns of x and of out; they read and write multiples of 32
        columns. The weight is dense.
        """
        outputs, cols = weight.shape[-2:]
        size = ELEMENT_BYTES[self.dtype]
        assert outputs == padded(outputs)
        assert cols == padded(cols)
        op = Linear(
            x=x.id,
            weight=self.weight(weight),
            out=out.id,
            groups=groups,
            cols=cols,
            outputs=outputs,
            x_bytes=padded(x.cols) * size,
            x_head_step=steps[0] * size,
            out_head_step=steps[1],
            out_stride=padded(out.cols),
        )
        self.emit(op, x, dtype=self.dtype)

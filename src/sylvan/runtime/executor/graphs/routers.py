"""Native matrix products for the expert routers of transformers models.

PyTorch's product of a few rows may differ in its last bits from the product of many rows, so the
experts of a row, or their weights, would depend on the batch. PyTorch still computes the rest of a
router, in whole blocks of rows, because it uses other code for the last elements of a tensor.

Shapes: T rows, D columns, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from sylvan.kernels import ops
from sylvan.kernels.api import TracedTensor, Unsupported
from sylvan.kernels.native.compile import compile_graph
from sylvan.kernels.native.graph import ProgramLimits
from sylvan.kernels.native.library import Library
from sylvan.kernels.native.program import Program
from sylvan.kernels.native.tracer import NativeTracer
from sylvan.runtime.executor.graphs.module_trace import PARAMETER, plain, products_of, takes
from sylvan.runtime.executor.graphs.native_modules import (
    MAX_ROWS,
    NativeRowsModule,
    RowProgram,
    tile_rows,
)

_TRIED_ROWS = 19  # in two blocks
_BLOCK = 16  # rows


def use_native_routers(
    model: nn.Module, library: Library, dtype: torch.dtype, names: Iterable[str]
) -> list[nn.Module]:
    """Replace routers whose rows are independent once one of their products is native.

    Args:
        model: The model with its weights.
        library: Native kernels.
        dtype: Type of the model's rows.
        names: Names of the expert modules; routers are their siblings.

    Returns:
        The replaced routers; native code has copies of their weights.
    """
    replaced: list[nn.Module] = []
    tracings: dict[torch.dtype, _Tracing] = {}
    for name, router, weight in _beside(model, names):
        multiplied = _multiplied(router, weight, dtype)
        if multiplied in (torch.float32, torch.bfloat16):
            if multiplied not in tracings:
                limits = ProgramLimits(max_tokens=MAX_ROWS, max_outputs=1)
                tracings[multiplied] = _Tracing(
                    NativeTracer(multiplied, limits, {}, library.constants), multiplied
                )
            tracings[multiplied].take(name, router, weight)
    for tracing in tracings.values():
        layout = compile_graph(tracing.tracer.graph)
        for one in tracing.found:
            program = Program(library, layout, one.segment, one.segment + 1)
            tile = tile_rows(library, tracing.dtype)
            rows = NativeRowsModule(
                one.router, RowProgram(program, one.x, one.out, tracing.dtype, tile)
            )
            made = NativeRouter(one.router, rows, one.weight.shape)
            if _by_rows(made, _some_rows(one.weight, dtype)):
                model.set_submodule(one.name, made)
                replaced.append(one.router)
    return replaced


class NativeRouter(nn.Module):
    """A router whose product with its weight is native; delegates other attributes to it."""

    def __init__(self, router: nn.Module, rows: NativeRowsModule, shape: torch.Size) -> None:
        super().__init__()
        self.router = router
        self._cols = shape[1]
        self._product = _Product(shape, rows)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_modules" not in self.__dict__ or name == "router":
                raise
            return getattr(self.router, name)

    def forward(self, x: torch.Tensor) -> Any:
        """As the router: rows of any shape -> tensors whose first dimension counts all rows."""
        rows_TD = x.reshape(-1, self._cols)
        count = len(rows_TD)
        if count % _BLOCK:
            rows_TD = F.pad(rows_TD, (0, 0, 0, -count % _BLOCK))
        with self._product:
            found = self.router(rows_TD)
        if count == len(rows_TD):
            return found
        if isinstance(found, torch.Tensor):
            return found[:count]
        return tuple(part[:count] for part in found)


class _Product(TorchFunctionMode):
    """Mode in which `rows` computes `F.linear(rows, weight)` for weights of one shape."""

    def __init__(self, shape: torch.Size, rows: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._shape, self._rows = shape, rows

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.linear and len(args) == 2 and not kwargs and args[1].shape == self._shape:
            return self._rows(args[0])
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, slots=True)
class _Found:
    name: str
    router: nn.Module
    weight: nn.Parameter
    x: TracedTensor
    out: TracedTensor
    segment: int


@dataclass(slots=True)
class _Tracing:
    """Traces one product per router, for rows of one type."""

    tracer: NativeTracer
    dtype: torch.dtype
    found: list[_Found] = field(default_factory=list[_Found])
    _inputs: dict[int, TracedTensor] = field(default_factory=dict[int, TracedTensor])

    def take(self, name: str, router: nn.Module, weight: nn.Parameter) -> None:
        """Trace the product of a router."""
        cols = weight.shape[1]
        if cols not in self._inputs:
            kind = "bf16" if self.dtype == torch.bfloat16 else "f32"
            self._inputs[cols] = self.tracer.input(cols, kind)
        x, segment = self._inputs[cols], self.tracer.next_segment()
        out = ops.linear(x, weight.detach().clone(), None)
        assert isinstance(out, TracedTensor)
        self.tracer.external(out)
        self.found.append(_Found(name, router, weight, x, out, segment))


def _beside(
    model: nn.Module, names: Iterable[str]
) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """Yield the siblings of the named modules that have exactly one matrix, with that matrix."""
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in names):
        for child, module in model.get_submodule(parent).named_children():
            matrices = [x for x in module.parameters() if x.dim() == 2 and not x.is_meta]
            if len(matrices) == 1 and takes(module, 1):
                yield f"{parent}.{child}".lstrip("."), module, matrices[0]


def _some_rows(weight: nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(_TRIED_ROWS, weight.shape[1], generator=generator).to(dtype)


def _multiplied(router: nn.Module, weight: nn.Parameter, dtype: torch.dtype) -> torch.dtype | None:
    """Type of the rows that a router multiplies by its weight; None: it computes otherwise."""
    try:
        (product,) = products_of(router, weight.shape[1], dtype)
    except (Unsupported, ValueError):
        return None
    x, matrix = product.args[:2]
    is_own = len(product.args) == 2 and plain(matrix).function == PARAMETER
    known = is_own and matrix.shape == weight.shape and not product.options
    return x.dtype if known and x.dtype == matrix.dtype else None


def _by_rows(made: NativeRouter, x: torch.Tensor) -> bool:
    """Whether a router gives a row the same result alone and in a batch.

    It must also accept rows of more dimensions, with equal results.
    """
    with torch.inference_mode():
        if (together := _outputs(made(x))) is None:
            return False
        deeper = _outputs(made.router(x[None]))
        alone = [_outputs(made(x[i : i + 1])) or () for i in range(len(x))]
    if deeper is None or [part.shape for part in deeper] != [part.shape for part in together]:
        return False
    joined = [torch.cat(parts) for parts in zip(*alone, strict=True)]
    return all(map(torch.equal, together, joined))


def _outputs(given: Any) -> tuple[torch.Tensor, ...] | None:
    """The outputs of a router, if they are nothing but tensors."""
    parts = given if isinstance(given, tuple) else (given,)
    return parts if all(isinstance(part, torch.Tensor) for part in parts) else None

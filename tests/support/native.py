"""Runs single ops of the native library, on the variants that this machine supports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
import torch

from sylvan.kernels.api import TracedTensor
from sylvan.kernels.native.binding import StepRun
from sylvan.kernels.native.compile import compile_graph
from sylvan.kernels.native.graph import ProgramLimits
from sylvan.kernels.native.library import Library, LibraryMissing, usable
from sylvan.kernels.native.program import Program
from sylvan.kernels.native.tracer import NativeTracer
from sylvan.kernels.paged.cache import LayerPages

MAX_ROWS = 512
DTYPES = [torch.bfloat16, torch.float32]


def variants() -> list[object]:
    """Return fixture parameters for the variants; one that is skipped if nothing is compiled."""
    try:
        found = [name for name, obstacle in usable().items() if not obstacle]
    except LibraryMissing:
        found = []
    return list(found) or [pytest.param("", marks=pytest.mark.skip("kernels are not compiled"))]


class NativeOp:
    """Records `op(tracer, *values)` once."""

    def __init__(
        self,
        library: Library,
        dtype: torch.dtype,
        op: Callable[..., TracedTensor],
        like: Sequence[torch.Tensor],
        pages: Mapping[int, LayerPages] | None = None,
    ) -> None:
        """`like` have the columns and dtypes of the inputs."""
        limits = ProgramLimits(max_tokens=MAX_ROWS, max_outputs=MAX_ROWS)
        tracer = NativeTracer(dtype, limits, pages or {}, library.constants)
        kinds = ["bf16" if x.dtype == torch.bfloat16 else "f32" for x in like]
        self.inputs = [tracer.input(x.shape[1], kind) for x, kind in zip(like, kinds, strict=True)]
        self.out = op(tracer, *self.inputs)
        tracer.pin(self.out)
        self.program = Program(library, compile_graph(tracer.graph))

    def write(self, *matrices: torch.Tensor) -> None:
        """Fill the inputs."""
        for value, x in zip(self.inputs, matrices, strict=True):
            self.program.read(value, len(x)).copy_(x)

    def run(self, step: StepRun) -> torch.Tensor:
        """Run it; return a copy of the result."""
        self.program.run(step)
        rows = step.outputs if self.out.rows == "outputs" else step.tokens
        return self.program.read(self.out, rows).clone()


def native(
    library: Library,
    dtype: torch.dtype,
    op: Callable[..., TracedTensor],
    inputs: Sequence[torch.Tensor],
    step: StepRun | None = None,
) -> torch.Tensor:
    """Record an op, run it once, copy the result."""
    recorded = NativeOp(library, dtype, op, inputs)
    recorded.write(*inputs)
    return recorded.run(step or StepRun(tokens=len(inputs[0])))


def random(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Return normal numbers that depend on the seed only."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float32) * scale).to(dtype)


def assert_close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    """Check that results agree up to the last digit of the type."""
    assert got.shape == want.shape
    tolerance = 2**-7 if dtype == torch.bfloat16 else 2e-5
    size = float(want.float().abs().max())
    torch.testing.assert_close(got.float(), want.float(), rtol=tolerance, atol=size * tolerance / 4)

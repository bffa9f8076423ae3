"""Native matrix products inside a model that computes everything else through PyTorch.

A model of transformers cannot be recorded: its forward is anybody's Python. But most of its time
goes into `nn.Linear`, and each of these is a program of one op.

Shapes: T rows, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from sylvan.kernels import ops
from sylvan.kernels.api import Unsupported, Value
from sylvan.kernels.native.binding import Run
from sylvan.kernels.native.library import Library, LibraryMissing
from sylvan.kernels.native.library import load as load_library
from sylvan.kernels.native.plan import place
from sylvan.kernels.native.program import Program
from sylvan.kernels.native.recorder import NativeRecorder, RecorderLimits

_MOST_ROWS = 512  # of one call: more are computed in pieces, so that buffers stay small


class NativeLinear(nn.Module):
    """Stands for an `nn.Linear`; its rows do not depend on each other in any bit."""

    def __init__(self, linear: nn.Linear, program: Program, x: Value, out: Value) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        # Without contents: some models ask for its dtype.
        self.weight = linear.weight
        self._program, self._x, self._out = program, x, out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape: (..., K) -> (..., N)."""
        rows_TK = x.reshape(-1, self.in_features)
        out_TN = rows_TK.new_empty(len(rows_TK), self.out_features)
        for first in range(0, len(rows_TK), _MOST_ROWS):
            part = rows_TK[first : first + _MOST_ROWS]
            self._program.write(self._x, part)
            self._program.run(Run(tokens=len(part)))
            out_TN[first : first + len(part)] = self._program.read(self._out, len(part))
        return out_TN.view(*x.shape[:-1], self.out_features)


def use_native_linears(model: nn.Module, dtype: torch.dtype, threads: int) -> Library | None:
    """Replace each `nn.Linear` whose weight is of `dtype`, if there are kernels for it here.

    The weights are packed one at a time, and PyTorch's copy is let go; only a head that is tied to
    the embedding is in memory twice.

    Returns:
        The library in use; None: nothing has been replaced.
    """
    try:
        library = load_library()
        limits = RecorderLimits(max_tokens=_MOST_ROWS, max_outputs=1)
        recorder = NativeRecorder(dtype, limits, {}, library.constants)
    except (LibraryMissing, Unsupported):
        return None
    found = list(_recorded(model, dtype, recorder))
    if not found:
        return None
    library.dll.sylvan_threads(threads)
    placed = place(recorder.draft)
    for index, (parent, name, linear, x, out) in enumerate(found):
        program = Program(library, placed, index, index + 1)
        setattr(parent, name, NativeLinear(linear, program, x, out))
    return library


def _recorded(
    model: nn.Module, dtype: torch.dtype, recorder: NativeRecorder
) -> Iterator[tuple[nn.Module, str, nn.Linear, Value, Value]]:
    """Each linear with its parent, its name there, and the values of its op."""
    inputs: dict[int, Value] = {}
    for parent in list(model.modules()):
        for name, linear in list(parent.named_children()):
            if type(linear) is not nn.Linear or linear.weight.dtype != dtype:
                continue
            cols = linear.in_features
            if cols not in inputs:
                inputs[cols] = recorder.input(cols, "bf16" if dtype == torch.bfloat16 else "f32")
            # The recorder frees what it has packed, but this may be shared or part of a file.
            out = ops.linear(inputs[cols], linear.weight.detach().clone(), linear.bias)
            assert isinstance(out, Value)
            linear.weight = nn.Parameter(torch.empty_like(linear.weight, device="meta"), False)
            yield parent, name, linear, inputs[cols], out

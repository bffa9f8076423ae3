"""Native replacements for layers of native models.

Shapes: T rows, D columns of a row, V rows of a table.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import torch
from torch import nn

from sylvan.kernels import ops
from sylvan.kernels.api import ActivationKind, TracedTensor, X
from sylvan.kernels.native.binding import StepRun
from sylvan.kernels.native.builder import padded
from sylvan.runtime.executor.graphs.native_modules import NativeRowsModule, RowProgram
from sylvan.runtime.layers.embedding import Embedding
from sylvan.runtime.layers.linear import Linear
from sylvan.runtime.layers.norm import LayerNorm, RMSNorm


class NativeLayerLinear(nn.Module):
    """Replaces a `Linear`, whose weight has been freed."""

    def __init__(self, module: Linear, own: NativeRowsModule, wide: NativeRowsModule) -> None:
        """`own` returns rows in the model's dtype, `wide` in float32."""
        super().__init__()
        self.weight, self.bias, self.lora = module.weight, module.bias, module.lora
        self._own, self._wide = own, wide
        self._default: bool = inspect.signature(module.forward).parameters["out_f32"].default

    def forward(self, x: torch.Tensor, *, out_f32: bool | None = None) -> torch.Tensor:
        """Shape: (T, K) -> (T, N), in the model's dtype or float32."""
        y = (self._wide if self._default or out_f32 else self._own)(x)
        return y if self.lora is None else ops.lora(x, y, self.lora)

    def gated(self, x: torch.Tensor, kind: ActivationKind) -> X:
        """As `Linear.gated`."""
        return ops.glu(self(x), kind)


class NativeLayerNorm(nn.Module):
    """Replaces a norm; falls back to PyTorch for inputs without a kernel."""

    def __init__(
        self,
        module: RMSNorm | LayerNorm,
        alone: Mapping[str, RowProgram],
        added: RowProgram,
        residual: TracedTensor,
    ) -> None:
        """`alone`: norms of rows, by their dtype; `added`: the norm of rows plus residual."""
        super().__init__()
        self.weight = module.weight
        self._wrapped = (module,)  # not registered as a child module
        self._dtype = added.dtype
        self._alone = {kind: _NormCall(native) for kind, native in alone.items()}
        self._added = _NormCall(added)
        self._residual = added.program.number(residual)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A float32 residual is updated in place. Shape: (T, D)."""
        kind = "f32" if x.dtype == torch.float32 else "bf16"
        known = x.dtype in (torch.float32, self._dtype) and x.is_contiguous()
        if residual is None:
            if known and kind in self._alone and self._added.fits(x):
                return self._alone[kind](x), x
        elif known and x.dtype == self._dtype and _is_stream(residual) and self._added.fits(x):
            return self._added(x, (self._residual, residual.data_ptr())), residual
        return self._wrapped[0](x, residual)


def _is_stream(residual: torch.Tensor) -> bool:
    return residual.dtype == torch.float32 and residual.is_contiguous()


class _NormCall:
    """One op on contiguous rows without padding."""

    def __init__(self, native: RowProgram) -> None:
        program = native.program
        self._program, self._dtype, self._cols = program, native.dtype, native.out.cols
        self._x, self._out = program.number(native.x), program.number(native.out)
        self._unpadded = padded(self._cols) == self._cols
        self._step = StepRun()

    def fits(self, x: torch.Tensor) -> bool:
        """Whether rows can be read and written in place."""
        return self._unpadded and x.shape[-1] == self._cols

    def __call__(self, x: torch.Tensor, *beside: tuple[int, int]) -> torch.Tensor:
        out = torch.empty(x.shape, dtype=self._dtype)
        self._step.tokens = x.numel() // self._cols
        places = (self._x, x.data_ptr()), (self._out, out.data_ptr()), *beside
        self._program.run_at(self._step, *places)
        return out


class NativeTable(nn.Module):
    """Replaces an embedding whose table is the packed weight of a head."""

    def __init__(self, module: Embedding, native: RowProgram) -> None:
        super().__init__()
        self.weight, self.scale, self.lora = module.weight, module.scale, module.lora
        self._program, self._cols = native.program, native.out.cols
        self._out = native.program.number(native.out)
        self._step = StepRun()

    def forward(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Shape: (T,) -> float32 (T, D)."""
        ids = ids_T.to(torch.int32).contiguous()
        out_TD = torch.empty(len(ids), padded(self._cols), dtype=torch.float32)
        self._step.tokens, self._step.ids = len(ids), ids.data_ptr()
        self._program.run_at(self._step, (self._out, out_TD.data_ptr()))
        rows_TD = out_TD[:, : self._cols].contiguous()
        return rows_TD if self.lora is None else ops.lora_embedding(ids_T, rows_TD, self.lora)

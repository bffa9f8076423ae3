"""Recurrent mixers over the rows of several requests, each with its state in a slot.

All are computed token by token, so results do not depend on how a prompt is chunked.
Convolutions are causal and depthwise; state spaces are those of Mamba (arXiv:2312.00752) and
Mamba 2 (arXiv:2405.21060); the gated delta rule is that of arXiv:2412.06464. PyTorch has the
reference, `native` the C++ kernels.

Shapes: T rows, C channels, K taps or keys, H heads, P channels of a head, N numbers of state a
channel, V values, S slots.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional as F

from sylvan.kernels.gpu.choice import kernels_for
from sylvan.kernels.scan.conv import short_conv
from sylvan.kernels.scan.delta import DeltaInputs, delta_scan
from sylvan.kernels.scan.device_spans import DeviceSpans
from sylvan.kernels.scan.space import SpaceInputs, space_scan
from sylvan.kernels.scan.spans import Spans

__all__ = [
    "DeltaInputs",
    "DeviceSpans",
    "Scans",
    "SpaceInputs",
    "Spans",
    "TorchScans",
    "delta_scan",
    "scans_of",
    "short_conv",
    "space_scan",
]


class Scans(Protocol):
    """Computes recurrent mixers, and writes the states of the requests and of `saves`."""

    def conv(
        self,
        x_TC: torch.Tensor,
        weight_CK: torch.Tensor,
        bias_C: torch.Tensor | None,
        state_SKC: torch.Tensor,
        spans: Spans | DeviceSpans,
        *,
        silu: bool = False,
    ) -> torch.Tensor:
        """Weighted sum of each channel's last K inputs, plus bias, in x's dtype. Shape: (T, C).

        `silu` applies to the rounded sum. A state holds the last K inputs, newest last, in the
        dtype of x.
        """
        ...

    def space(
        self, inputs: SpaceInputs, state_SHPN: torch.Tensor, spans: Spans | DeviceSpans
    ) -> torch.Tensor:
        """With h = exp(dt A) h + dt x B: C h + D x, in float32. Shape: (T, H, P)."""
        ...

    def delta(
        self, inputs: DeltaInputs, state_SHKV: torch.Tensor, spans: Spans | DeviceSpans
    ) -> torch.Tensor:
        """The gated delta rule, on queries and keys of unit length; float32 (T, H, V)."""
        ...


class TorchScans:
    """The reference in PyTorch, on any device."""

    def conv(
        self,
        x_TC: torch.Tensor,
        weight_CK: torch.Tensor,
        bias_C: torch.Tensor | None,
        state_SKC: torch.Tensor,
        spans: Spans | DeviceSpans,
        *,
        silu: bool = False,
    ) -> torch.Tensor:
        out_TC = short_conv(x_TC, weight_CK, bias_C, state_SKC, _on_host(spans)).to(x_TC.dtype)
        return F.silu(out_TC) if silu else out_TC

    def space(
        self, inputs: SpaceInputs, state_SHPN: torch.Tensor, spans: Spans | DeviceSpans
    ) -> torch.Tensor:
        return space_scan(inputs, state_SHPN, _on_host(spans))

    def delta(
        self, inputs: DeltaInputs, state_SHKV: torch.Tensor, spans: Spans | DeviceSpans
    ) -> torch.Tensor:
        return delta_scan(inputs, state_SHKV, _on_host(spans))


def scans_of(device: torch.device) -> Scans | None:
    """Return kernels for a device; None: it has none, or (CPU) step programs include them."""
    kernels = kernels_for("scan", device)
    return None if kernels is None else kernels.TritonScans()


def _on_host(spans: Spans | DeviceSpans) -> Spans:
    return spans.on_host() if isinstance(spans, DeviceSpans) else spans

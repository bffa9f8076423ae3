"""Recurrent mixers over the rows of several requests, each going on from a state in a slot.

All are computed token by token, so that a result does not depend on how a prompt was cut.
`short_conv`: causal depthwise convolution. `space_scan`: state spaces, Mamba (arXiv:2312.00752) and
Mamba 2 (arXiv:2405.21060). `delta_scan`: gated delta rule (arXiv:2412.06464).
"""

from __future__ import annotations

from sylvan.kernels.scan.conv import short_conv
from sylvan.kernels.scan.delta import DeltaInputs, delta_scan
from sylvan.kernels.scan.space import SpaceInputs, space_scan
from sylvan.kernels.scan.spans import Spans

__all__ = ["DeltaInputs", "SpaceInputs", "Spans", "delta_scan", "short_conv", "space_scan"]

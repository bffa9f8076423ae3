"""Causal depthwise convolution over few tokens.

Shapes: T rows, C channels, K taps, S slots.
"""

from __future__ import annotations

import torch

from sylvan.kernels.scan.spans import Spans, scan


def short_conv(
    x_TC: torch.Tensor,
    weight_CK: torch.Tensor,
    bias_C: torch.Tensor | None,
    state_SCK: torch.Tensor,
    spans: Spans,
) -> torch.Tensor:
    """Each channel's last K inputs, weighted, in float32. Shape: (T, C).

    The state of a request holds its last K inputs, the newest last.
    """
    weight = weight_CK.float()
    lens = spans.lens
    if any(n > 1 for n in lens):
        return _whole(x_TC, weight, bias_C, state_SCK, spans)

    def step(held: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        window = torch.cat((held[..., 1:], x_TC[rows, :, None].to(held.dtype)), -1)
        return window, (window.float() * weight).sum(-1)

    out = scan(state_SCK, spans, torch.empty_like(x_TC, dtype=torch.float32), step)
    return out if bias_C is None else out + bias_C.float()


def _whole(
    x_TC: torch.Tensor,
    weight_CK: torch.Tensor,
    bias_C: torch.Tensor | None,
    state_SCK: torch.Tensor,
    spans: Spans,
) -> torch.Tensor:
    """All rows of a request at once: the same sums, as windows over its inputs."""
    taps = weight_CK.shape[1]
    out_TC = torch.empty_like(x_TC, dtype=torch.float32)
    for request, (start, slot) in enumerate(zip(spans.starts[:-1], spans.slots, strict=True)):
        rows = x_TC[start : spans.starts[request + 1]]
        inputs = torch.cat((state_SCK[slot].T, rows.to(state_SCK.dtype)))  # (K + L, C)
        windows = inputs.unfold(0, taps, 1)[1:].float()  # (L, C, K)
        out_TC[start : start + len(rows)] = (windows * weight_CK).sum(-1)
        state_SCK[slot] = inputs[-taps:].T
        for which, tokens, kept in spans.saves:
            if which == request:
                state_SCK[kept] = inputs[tokens : tokens + taps].T
    return out_TC if bias_C is None else out_TC + bias_C.float()

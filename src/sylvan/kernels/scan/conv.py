"""Causal depthwise convolution with few taps.

Shapes: T rows, C channels, K taps, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sylvan.kernels.scan.spans import Spans, scan


def short_conv(
    x_TC: torch.Tensor,
    weight_CK: torch.Tensor,
    bias_C: torch.Tensor | None,
    state_SKC: torch.Tensor,
    spans: Spans,
) -> torch.Tensor:
    """Weighted sum of each channel's last K inputs, in float32. Shape: (T, C).

    The state of a request holds its last K inputs, newest last.
    """
    weight_KC = weight_CK.float().T
    if any(n > 1 for n in spans.lens):
        out = _whole(x_TC, weight_KC, state_SKC, spans)
    else:

        def step(held: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            window = torch.cat((held[:, 1:], x_TC[rows, None].to(held.dtype)), 1)
            return window, _weighted(window.unbind(1), weight_KC)

        out = scan(state_SKC, spans, torch.empty_like(x_TC, dtype=torch.float32), step)
    return out if bias_C is None else out + bias_C.float()


def _weighted(inputs: Sequence[torch.Tensor], weight_KC: torch.Tensor) -> torch.Tensor:
    """Sum oldest first, one by one, so that no library chooses the order."""
    total = torch.zeros_like(inputs[0], dtype=torch.float32)
    for x, weight_C in zip(inputs, weight_KC, strict=True):
        total = total + x.float() * weight_C
    return total


def _whole(
    x_TC: torch.Tensor, weight_KC: torch.Tensor, state_SKC: torch.Tensor, spans: Spans
) -> torch.Tensor:
    """Compute all rows of a request at once, with the same sums."""
    taps = len(weight_KC)
    out_TC = torch.empty_like(x_TC, dtype=torch.float32)
    for request, (start, slot) in enumerate(zip(spans.starts[:-1], spans.slots, strict=True)):
        rows = x_TC[start : spans.starts[request + 1]]
        inputs = torch.cat((state_SKC[slot], rows.to(state_SKC.dtype)))  # (K + L, C)
        windows = [inputs[k + 1 : k + 1 + len(rows)] for k in range(taps)]
        out_TC[start : start + len(rows)] = _weighted(windows, weight_KC)
        state_SKC[slot] = inputs[-taps:]
        for which, tokens, kept in spans.saves:
            if which == request:
                state_SKC[kept] = inputs[tokens : tokens + taps]
    return out_TC

"""References of models that transformers does not have: their published computation, written out.

A reference is a function of ids and of tensors under the names that published checkpoints use. It
computes all tokens of one text at once, in the type of its weights, and shares no code with the
package. `Published` makes random tensors for it, writes them as a checkpoint, and looks like a
model of transformers to `compare`.

Shapes: T tokens, N query heads, K key heads, H columns of a head, D hidden, F inner, E experts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

Tensors = Callable[..., torch.Tensor]
"""(name, *shape) -> the tensor of that name."""
Run = Callable[[dict[str, Any], Tensors, torch.Tensor], torch.Tensor]
"""(config.json, tensors, ids) -> logits (T, V)."""


class Published(nn.Module):
    """A random checkpoint of a published architecture, and its computation.

    The first run makes the tensors, in the shapes that it asks for.
    """

    def __init__(self, raw: dict[str, Any], run: Run, seed: int) -> None:
        super().__init__()
        self.raw, self._run = raw, run
        self.tensors = nn.ParameterDict()
        random = torch.Generator().manual_seed(seed)

        def made(name: str, *shape: int) -> torch.Tensor:
            if name.replace(".", "/") not in self.tensors:
                self.tensors[name.replace(".", "/")] = _random(name, shape, random)
            return self._tensor(name, *shape)

        with torch.inference_mode(mode=False), torch.no_grad():
            run(raw, made, torch.arange(3))

    def forward(self, ids: torch.Tensor, *, use_cache: bool = False) -> SimpleNamespace:
        """As transformers' models: `logits` of shape (1, T, V)."""
        return SimpleNamespace(logits=self._run(self.raw, self._tensor, ids[0])[None])

    def set_experts_implementation(self, name: str) -> None:
        """There is one only."""

    def write(self, folder: Path) -> None:
        """config.json and model.safetensors."""
        (folder / "config.json").write_text(json.dumps(self.raw))
        found = {name.replace("/", "."): t.data.clone() for name, t in self.tensors.items()}
        save_file(found, folder / "model.safetensors")

    def _tensor(self, name: str, *shape: int) -> torch.Tensor:
        found = self.tensors[name.replace(".", "/")]
        assert found.shape == shape, (name, found.shape, shape)
        return found


def _random(name: str, shape: tuple[int, ...], random: torch.Generator) -> nn.Parameter:
    numbers = torch.randn(shape, generator=random)
    if len(shape) > 1:
        numbers = numbers * 0.15
    else:
        numbers = 0.1 * numbers + (0 if name.endswith("bias") else 1)
    return nn.Parameter(numbers, requires_grad=False)


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def turned(
    x_TNH: torch.Tensor, base: float, part: float = 1.0, *, pairs: bool = False, scale: float = 1.0
) -> torch.Tensor:
    """Rotary positions on the first `part` of the columns; `pairs` of neighbours, or of halves."""
    count = int(x_TNH.shape[-1] * part)
    speed = base ** -(torch.arange(0, count, 2, dtype=torch.float32) / count)
    angle = torch.arange(len(x_TNH), dtype=torch.float32)[:, None] * speed / scale
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    x, rest = x_TNH[..., :count], x_TNH[..., count:]
    if pairs:
        a, b = x[..., ::2], x[..., 1::2]
        found = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        a, b = x.chunk(2, -1)
        found = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return torch.cat((found, rest), -1)


def attend(
    q_TNH: torch.Tensor,
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    *,
    scale: float | None = None,
    cap: float | None = None,
    slopes: torch.Tensor | None = None,
    block: int = 1,
) -> torch.Tensor:
    """Attention to the own block and all before it: causal with 1. Shape: (T, N H)."""
    times = q_TNH.shape[1] // k_TKH.shape[1]
    k, v = (x.repeat_interleave(times, 1).transpose(0, 1) for x in (k_TKH, v_TKH))
    scores = q_TNH.transpose(0, 1) @ k.transpose(1, 2)
    scores = scores * (q_TNH.shape[-1] ** -0.5 if scale is None else scale)
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    at = torch.arange(len(q_TNH))
    if slopes is not None:
        scores = scores - slopes[:, None, None] * (at[:, None] - at)
    number = at // block
    scores = scores.masked_fill(number[:, None] < number, -math.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)


def heads(x_TC: torch.Tensor, size: int) -> torch.Tensor:
    return x_TC.unflatten(-1, (-1, size))


def experts(
    x_TD: torch.Tensor,
    shares_TE: torch.Tensor,
    one: Callable[[int, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Sum over experts, of all tokens, by shares that are mostly 0."""
    parts = [one(e, x_TD) * shares_TE[:, e, None] for e in range(shares_TE.shape[1])]
    return torch.stack(parts).sum(0)


def best(scores_TE: torch.Tensor, count: int, by: torch.Tensor | None = None) -> torch.Tensor:
    """The scores of the best (`by` other scores), and 0 for the others."""
    chosen = (scores_TE if by is None else by).topk(count, -1).indices
    return torch.zeros_like(scores_TE).scatter(1, chosen, scores_TE.gather(1, chosen))


def gated(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> Any:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

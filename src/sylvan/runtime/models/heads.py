"""Heads that classify or score a text instead of continuing it.

Shapes: R vectors, D hidden, C labels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from sylvan.kernels import ops
from sylvan.kernels.api import ActivationKind, LinearWeight, TracedTensor, Unsupported, X
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.linear import Linear, VocabHead
from sylvan.runtime.layers.norm import LayerNorm
from sylvan.runtime.models.config import ModelConfig

UNUSED_HEADS = ("lm_head.", "cls.", "score.", "predictions.")
"""Name prefixes of heads that checkpoints may contain but that are not served."""

MAX_LABELS = 1 << 20
_MAX_DRAFTS = 64
_MTP = ("mtp_layers.", "mtp_block.", "mtp_emb_norm.", "mtp_hidden_norm.", "mtp_linear_proj.")


def draft_layers(config: ModelConfig) -> tuple[str, ...]:
    """Name prefixes of layers that predict further tokens (MTP), found in many checkpoints."""
    count = config.raw.get("num_nextn_predict_layers")
    last = config.num_hidden_layers
    known = count if isinstance(count, int) and 0 < count <= _MAX_DRAFTS else 0
    numbers = range(last, last + known)
    return ("mtp.", *_MTP, *(f"layers.{number}." for number in numbers))


class Score(Linear):
    """One score per label. Shape: (R, D) -> float32 (R, C)."""

    def __init__(self, config: ModelConfig, build: Build, *, bias: bool = False) -> None:
        super().__init__(build, config.hidden_size, (config.num_labels,), bias=bias)

    def forward(self, x: X, *, out_f32: bool = True) -> X:
        """Shape: (R, D) -> (R, C)."""
        return super().forward(x, out_f32=out_f32)


class Relu(nn.Module):
    """Shape: (R, D) -> (R, D)."""

    def forward(self, x: X) -> X:
        """Set negative numbers to 0. Shape: (R, D) -> (R, D)."""
        return ops.activation(x, "relu")


class ClassHead(nn.Module):
    """Classification head of encoders: dense, activation, optional norm, one logit per label.

    Shape: (R, D) -> float32 (R, C).
    """

    def __init__(
        self,
        config: ModelConfig,
        build: Build,
        act: ActivationKind,
        *,
        bias: bool = True,
        norm: LayerNorm | None = None,
    ) -> None:
        super().__init__()
        self.dense = Linear(build, config.hidden_size, (config.hidden_size,), bias=bias)
        self.norm = norm
        self.out = Score(config, build, bias=True)
        self._act: ActivationKind = act

    def forward(self, x: X) -> X:
        """Shape: (R, D) -> (R, C)."""
        x = ops.activation(self.dense(x), self._act)
        return self.out(x if self.norm is None else self.norm(x)[0])


class MaskedLMHead(nn.Module):
    """Dense, activation, norm, and a logit per word: the head of masked language models.

    Shape: (R, D) -> float32 (R, V). `table` may be the embedding table, whose width is `inner`.
    """

    def __init__(
        self,
        config: ModelConfig,
        build: Build,
        act: ActivationKind,
        inner: int,
        table: LinearWeight | None,
    ) -> None:
        super().__init__()
        self.transform = Linear(build, config.hidden_size, (inner,), bias=True)
        self.transform_norm = LayerNorm(build, inner, config.rms_norm_eps)
        self.lm_head = VocabHead(build, inner, config.vocab_size, bias=True)
        if table is not None:
            self.lm_head.weight = table
        self._act: ActivationKind = act

    def forward(self, x: X) -> X:
        """Shape: (R, D) -> (R, V)."""
        x = ops.activation(self.transform(x), self._act)
        return self.lm_head(self.transform_norm(x)[0], out_f32=True)


class WeightedScore(nn.Module):
    """A scalar reward: rewards of several aims, weighted by an mlp over the same vector.

    The matrix gives a pair of numbers per aim, of which only the first is used (URM,
    arXiv:2410.00847).
    Shape: (R, D) -> float32 (R, 1).
    """

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        dim, pairs = config.hidden_size, count_labels(config.raw)
        if pairs % 2:
            raise ConfigError(f"config.json: num_labels must be even, it is {pairs}")
        self.rewards = Linear(build, dim, (pairs,), bias=False)
        sizes = (dim, dim), (dim, dim), (dim, pairs // 2)
        inner, middle, outer = (Linear(build, n, (m,), bias=True) for n, m in sizes)
        self.weights = nn.Sequential(inner, nn.SELU(), middle, nn.SELU(), outer)

    def forward(self, x: X) -> X:
        """Shape: (R, D) -> (R, 1)."""
        if isinstance(x, TracedTensor):
            raise Unsupported("weighted rewards")
        assert isinstance(x, torch.Tensor)
        rewards = self.rewards(x, out_f32=True)[:, ::2]
        return (rewards * self.weights(x).float()).sum(-1, keepdim=True)


def make_score(config: ModelConfig, build: Build) -> nn.Module | None:
    """The scoring head of a decoder; None if it has none."""
    if config.head == "reward":
        dim = config.hidden_size
        parts = Linear(build, dim, (dim,), bias=True), Relu(), Score(config, build, bias=True)
        return nn.Sequential(*parts)
    if config.head == "weighted":
        return WeightedScore(config, build)
    return Score(config, build) if config.head == "score" else None


def count_labels(raw: dict[str, Any], default: int = 2) -> int:
    """Number of labels of a classifier, counted as in transformers.

    Raises:
        ConfigError: the number is invalid.
    """
    names = raw.get("id2label")
    count = raw.get("num_labels") or (len(names) if isinstance(names, dict) else default)
    if not isinstance(count, int) or not 1 <= count <= MAX_LABELS:
        raise ConfigError(f"config.json: num_labels must be in 1..{MAX_LABELS}, it is {count!r}")
    return count

"""Heads over single tokens: token vectors, word weights, step rewards.

BGE-M3 (arXiv:2402.03216) has two additional matrices: `colbert_linear.pt` projects the vectors of
all tokens but the first, `sparse_linear.pt` computes a weight per token. Process reward models
(Qwen2.5 Math PRM) judge each step at its last token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.pickled import read_tensors
from sylvan.utils.json_files import read_json

Transform = Callable[[torch.Tensor], torch.Tensor]

STEP_TOKEN = "<extra_0>"
_VECTORS, _WEIGHTS = "colbert_linear.pt", "sparse_linear.pt"


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenHeads:
    """Heads for the vectors of single tokens, float32 (n, D).

    Attributes:
        transforms: Applied in order to token vectors.
        skips_first: Whether the first token, which represents the text, gets no token vector.
        normalize: Whether token vectors have unit length.
        weights: Computes the word weights (n,); None: there are none.
        step_token: Token that ends a step.
    """

    transforms: tuple[Transform, ...] = ()
    skips_first: bool = False
    normalize: bool = True
    weights: Transform | None = None
    step_token: int | None = None


def read_token_heads(model_dir: Path, dim: int) -> TokenHeads | None:
    """Load the two matrices of BGE-M3, for vectors of `dim` numbers; None: it has none.

    Raises:
        ConfigError: One of them is missing, unreadable, or has another shape.
    """
    found = [model_dir / name for name in (_VECTORS, _WEIGHTS)]
    if not any(path.is_file() for path in found):
        return None
    if missing := [path.name for path in found if not path.is_file()]:
        raise ConfigError(f"{str(model_dir)!r} lacks {missing[0]}, but has the other BGE-M3 head")
    vectors, weights = (_linear(path, dim) for path in found)
    return TokenHeads(
        transforms=(vectors,), skips_first=True, weights=lambda x: weights(x).relu()[:, 0]
    )


def step_token(model_dir: Path) -> int:
    """The token that ends a step.

    Raises:
        ConfigError: The tokenizer has no such token.
    """
    try:
        raw: Any = read_json(model_dir / "tokenizer.json")
    except (OSError, ValueError) as error:
        raise ConfigError(f"tokenizer.json cannot be read: {error}") from None
    added = raw.get("added_tokens") if isinstance(raw, dict) else None
    for entry in added if isinstance(added, list) else ():
        if entry.get("content") == STEP_TOKEN and isinstance(entry.get("id"), int):
            return entry["id"]
    raise ConfigError(f"tokenizer.json has no token {STEP_TOKEN}, which ends the steps of a text")


def _linear(path: Path, dim: int) -> Transform:
    tensors = {name: tensor.float() for name, tensor in read_tensors(path).items()}
    weight, bias = tensors.get("weight"), tensors.get("bias")
    if weight is None or weight.dim() != 2 or weight.shape[1] != dim:
        raise ConfigError(f"{str(path)!r} must hold a matrix with {dim} columns")
    return lambda x: F.linear(x, weight, bias)

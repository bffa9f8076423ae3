"""Heads over single tokens: vectors of tokens, weights of words, rewards of steps.

BGE-M3 (arXiv:2402.03216) keeps two matrices beside the model: `colbert_linear.pt` makes vectors of
all tokens but the first, `sparse_linear.pt` the weight of each. Process reward models (Qwen2.5 Math
PRM) judge each step at the token that ends it.
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
    """What becomes of the vectors of single tokens, float32 (n, D).

    Attributes:
        transforms: Applied in order for the vectors of tokens.
        skips_first: The first token has no vector of its own: it stands for the text.
        normalize: These vectors have unit length.
        weights: Makes a number of each, (n,); None: there are none.
        step_token: The token that ends a step.
    """

    transforms: tuple[Transform, ...] = ()
    skips_first: bool = False
    normalize: bool = True
    weights: Transform | None = None
    step_token: int | None = None


def read_token_heads(model_dir: Path, dim: int) -> TokenHeads | None:
    """The two matrices of BGE-M3, over vectors of `dim` numbers; None where there are none.

    Raises:
        ConfigError: one is missing, cannot be read, or does not fit.
    """
    found = [model_dir / name for name in (_VECTORS, _WEIGHTS)]
    if not any(path.is_file() for path in found):
        return None
    if missing := [path.name for path in found if not path.is_file()]:
        raise ConfigError(f"{str(model_dir)!r} lacks {missing[0]}, which belongs to the other head")
    vectors, weights = (_linear(path, dim) for path in found)
    return TokenHeads(
        transforms=(vectors,), skips_first=True, weights=lambda x: weights(x).relu()[:, 0]
    )


def step_token(model_dir: Path) -> int:
    """The token that ends a step.

    Raises:
        ConfigError: the tokenizer has none.
    """
    try:
        raw: Any = read_json(model_dir / "tokenizer.json")
    except (OSError, ValueError) as error:
        raise ConfigError(f"tokenizer.json cannot be read: {error}") from None
    added = raw.get("added_tokens") if isinstance(raw, dict) else None
    for entry in added if isinstance(added, list) else ():
        if entry.get("content") == STEP_TOKEN and isinstance(entry.get("id"), int):
            return entry["id"]
    raise ConfigError(f"tokenizer.json has no token {STEP_TOKEN}, by which steps of a text end")


def _linear(path: Path, dim: int) -> Transform:
    tensors = {name: tensor.float() for name, tensor in read_tensors(path).items()}
    weight, bias = tensors.get("weight"), tensors.get("bias")
    if weight is None or weight.dim() != 2 or weight.shape[1] != dim:
        raise ConfigError(f"{str(path)!r} holds no matrix over {dim} columns")
    return lambda x: F.linear(x, weight, bias)

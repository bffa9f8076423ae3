"""Recognises the transformer blocks of an encoder in transformers by their submodules.

Shapes: T rows, D columns of a row, F columns within a feed-forward, N heads, H columns of a head.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F

from sylvan.kernels.api import ActivationKind

BlockActivation = ActivationKind | Literal["quick_gelu"]

_ACTS: Mapping[BlockActivation, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {
        "gelu": F.gelu,
        "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
        "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
        "silu": F.silu,
        "relu": F.relu,
    }
)
_FIRST_NORMS = (
    *("layer_norm1", "norm1", "layernorm_before", "attention_norm", "self_attn_layer_norm"),
    *("rms_norm1", "input_layernorm"),
)
_SECOND_NORMS = (
    *("layer_norm2", "norm2", "layernorm_after", "ffn_norm", "final_layer_norm"),
    *("rms_norm2", "post_attention_layernorm"),
)
_ATTENTIONS = ("self_attn", "attn", "attention")
_FEED_FORWARDS = ("mlp", "feed_forward", "ffn")
_OUTS = ("out_proj", "o_proj", "proj", "projection_layer")
_PAIRS = (("fc1", "fc2"), ("linear_fc1", "linear_fc2"))
_ACT_NAMES = ("activation_fn", "act_fn", "act")
_ACT_BOUND = 1e-5  # tolerance for activations of numbers up to 8


@dataclass(frozen=True, slots=True)
class BlockNorm:
    """Norm of rows: LayerNorm, or RMSNorm (`rms`)."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float
    rms: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderBlock:
    """x += a * attention(norm(x)); x += b * feed-forward(norm(x)).

    Attributes:
        norms: The two norms.
        qkv: Query, key and value matrices, or one joined matrix.
        head_norms: Norms of query and key heads, per head or over all heads.
        out: Output matrix of attention.
        inner: Matrices before the activation: gate and up, or a single one.
        down: Matrix after the activation.
        act: Activation.
        factors: a and b, (D,) each.
        num_heads: Query heads.
        head_dim: Columns of a head.
        scale: Scale of scores.
        packed: Whether it takes rows (T, D) of several sequences with `cu_seqlens`, instead of
            (B, T, D).
        takes_rotary: Whether it takes cosines and sines of rotary positions.
        as_tuple: Whether it returns its rows in a tuple.
    """

    norms: tuple[BlockNorm, BlockNorm]
    qkv: Sequence[nn.Linear]
    head_norms: tuple[BlockNorm | None, BlockNorm | None]
    out: nn.Linear
    inner: Sequence[nn.Linear]
    down: nn.Linear
    act: BlockActivation
    factors: tuple[torch.Tensor | None, torch.Tensor | None]
    num_heads: int
    head_dim: int
    scale: float
    packed: bool
    takes_rotary: bool
    as_tuple: bool = False

    @property
    def width(self) -> int:
        """Columns of a row."""
        return self.down.out_features

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads."""
        columns = sum(linear.out_features for linear in self.qkv)
        return (columns // self.head_dim - self.num_heads) // 2

    @property
    def linears(self) -> Sequence[nn.Linear]:
        """All matrices."""
        return (*self.qkv, self.out, *self.inner, self.down)


def block_of(module: nn.Module) -> EncoderBlock | None:
    """Return the parts of an encoder block; None: not an encoder block, or one with further parts.

    The caller verifies the result numerically.
    """
    first, second = (_norm(_part(module, names)) for names in (_FIRST_NORMS, _SECOND_NORMS))
    attention = _part(module, _ATTENTIONS)
    heads = None if attention is None else _heads(attention)
    if first is None or second is None or attention is None or heads is None:
        return None
    inner, down, act = _feed_forward(_part(module, _FEED_FORWARDS) or module)
    if down is None or act is None:
        return None
    known = inspect.signature(module.forward).parameters
    block = EncoderBlock(
        norms=(first, second),
        qkv=heads.qkv,
        head_norms=(_norm(_part(attention, ("q_norm",))), _norm(_part(attention, ("k_norm",)))),
        out=heads.out,
        inner=inner,
        down=down,
        act=act,
        factors=(getattr(module, "lambda_1", None), getattr(module, "lambda_2", None)),
        num_heads=heads.count,
        head_dim=heads.dim,
        scale=float(getattr(attention, "scale", getattr(attention, "scaling", heads.dim**-0.5))),
        packed="cu_seqlens" in known,
        takes_rotary="position_embeddings" in known,
    )
    return block if _is_all(module, block) else None


@dataclass(frozen=True, slots=True)
class _Heads:
    """The matrices of attention, and its query heads of `dim` columns."""

    qkv: Sequence[nn.Linear]
    out: nn.Linear
    count: int
    dim: int


def _heads(attention: nn.Module) -> _Heads | None:
    fused = _linear(attention, "qkv")
    split = [_linear(attention, name) for name in ("q_proj", "k_proj", "v_proj")]
    qkv = [linear for linear in ([fused] if fused else split) if linear is not None]
    out = next((found for name in _OUTS if (found := _linear(attention, name))), None)
    config = getattr(attention, "config", None)  # GLM-ASR has the number only there
    count: Any = getattr(attention, "num_heads", getattr(config, "num_attention_heads", None))
    if len(qkv) not in (1, 3) or out is None or not isinstance(count, int):
        return None
    return None if out.in_features % count else _Heads(qkv, out, count, out.in_features // count)


def _part(module: nn.Module, names: Sequence[str]) -> nn.Module | None:
    found = (getattr(module, name, None) for name in names)
    return next((part for part in found if isinstance(part, nn.Module)), None)


def _linear(module: nn.Module, name: str) -> nn.Linear | None:
    found = getattr(module, name, None)
    return found if type(found) is nn.Linear and not found.weight.is_meta else None


def _norm(module: nn.Module | None) -> BlockNorm | None:
    if isinstance(module, nn.LayerNorm):
        if module.weight is None or len(module.normalized_shape) != 1:
            return None
        return BlockNorm(module.weight, module.bias, module.eps, rms=False)
    if module is None or not type(module).__name__.endswith("RMSNorm"):
        return None
    eps: Any = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight: Any = getattr(module, "weight", None)
    if not isinstance(eps, float) or not isinstance(weight, torch.Tensor):
        return None
    return BlockNorm(weight, None, eps, rms=True)


def _feed_forward(
    module: nn.Module,
) -> tuple[Sequence[nn.Linear], nn.Linear | None, BlockActivation | None]:
    act: BlockActivation | None = next(
        (_activation(getattr(module, n)) for n in _ACT_NAMES if hasattr(module, n)), None
    )
    gate, up, down = (_linear(module, f"{name}_proj") for name in ("gate", "up", "down"))
    if gate is not None and up is not None:
        return (gate, up), down, act
    for first, last in _PAIRS:
        one, other = _linear(module, first), _linear(module, last)
        if one is not None:
            return (one,), other, act
    return (), None, act


def _activation(function: Any) -> BlockActivation | None:
    """Return the name of an activation, recognised by its values."""
    x = torch.linspace(-8, 8, 257)
    try:
        found = function(x)
    except (TypeError, RuntimeError):
        return None
    for name, known in _ACTS.items():
        if torch.allclose(found, known(x), rtol=0, atol=_ACT_BOUND):
            return name
    return None


def _is_all(module: nn.Module, block: EncoderBlock) -> bool:
    """Whether a block has no other parameters than these, and consistent sizes."""
    norms = [norm for norm in (*block.norms, *block.head_norms) if norm is not None]
    own = [norm.weight for norm in norms] + [norm.bias for norm in norms]
    own += [part for linear in block.linears for part in (linear.weight, linear.bias)]
    known = {id(part) for part in (*own, *block.factors) if part is not None}
    others = [p for p in module.parameters() if id(p) not in known]
    fits = block.width == block.qkv[0].in_features == block.inner[0].in_features
    return not others and fits and block.num_kv_heads > 0

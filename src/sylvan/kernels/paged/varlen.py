"""PyTorch's variable-length FlashAttention, if this version of PyTorch has it.

Shapes: T rows, R requests, S tokens with KV of all of them, N query heads, K key/value heads,
H head dim.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from dataclasses import dataclass
from typing import Any

import torch

from sylvan.kernels.api import AttentionLayer

_MODULE = "torch.nn.attention.varlen"
_NEEDED = frozenset({"scale", "window_size", "enable_gqa", "num_splits"})
_MAX_COLUMNS = 256


@dataclass(frozen=True, slots=True)
class Packed:
    """Rows of a step of consecutive requests, and the KV slots of their tokens.

    Attributes:
        rows: Rows of the step.
        slots_S: int64 KV slots of all their tokens.
        q_starts_R1: int32 (R + 1,): first row of each request, relative to `rows`.
        k_starts_R1: int32 (R + 1,): first token of each request in `slots_S`.
        max_rows: Most rows of one request.
        max_tokens: Most tokens of one request.
    """

    rows: slice
    slots_S: torch.Tensor
    q_starts_R1: torch.Tensor
    k_starts_R1: torch.Tensor
    max_rows: int
    max_tokens: int


@functools.cache
def find_varlen() -> Any:
    """PyTorch's variable-length attention for NVIDIA GPUs, or None if unavailable.

    Before 2.13 key splitting cannot be disabled, so a row's result would depend on the others.
    """
    if torch.version.hip is not None:
        return None
    if importlib.util.find_spec(_MODULE) is None:
        return None
    found = importlib.import_module(_MODULE).varlen_attn
    return found if set(inspect.signature(found).parameters) >= _NEEDED else None


def suits(q_TNH: torch.Tensor, layer: AttentionLayer) -> bool:
    """Whether its kernels support these heads and this layer."""
    plain = layer.softcap is None and layer.sinks is None and layer.causal
    width = layer.head_dim
    sized = width == layer.value_dim and width % 8 == 0 and width <= _MAX_COLUMNS
    return plain and sized and q_TNH.dtype in (torch.float16, torch.bfloat16)


def attend_packed(
    varlen: Any,
    q_TNH: torch.Tensor,
    pages: tuple[torch.Tensor, torch.Tensor],
    packed: Packed,
    layer: AttentionLayer,
) -> torch.Tensor:
    """Attend from each request's last tokens to all of its tokens. Shape: (T, N, H) -> (T, N, H).

    Args:
        varlen: Result of `find_varlen`.
        q_TNH: Queries of the requests' rows.
        pages: Keys and values (pages, page size, K, H) of the layer; they are gathered, because
            not every version reads pages of every size.
        packed: Rows and slots of the requests.
        layer: A layer that `suits`.
    """
    k_SKH, v_SKH = (x.flatten(0, 1)[packed.slots_S].to(q_TNH.dtype) for x in pages)
    return varlen(
        q_TNH,
        k_SKH,
        v_SKH,
        packed.q_starts_R1,
        packed.k_starts_R1,
        packed.max_rows,
        packed.max_tokens,
        scale=layer.scale,
        window_size=(-1 if layer.window is None else layer.window - 1, 0),
        enable_gqa=layer.num_heads != layer.num_kv_heads,
        num_splits=1,
    )

"""Native kernels inside a model whose Python runs on tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sylvan.kernels.api import AttentionLayer
from sylvan.kernels.native.attend import NativePagedAttention
from sylvan.kernels.native.copies import WeightCopy
from sylvan.kernels.native.library import Library
from sylvan.runtime.attention.native import NativeTensorAttention
from sylvan.runtime.executor.graphs.pages import NativePool
from sylvan.runtime.models.config import ModelConfig
from sylvan.runtime.pool.mha import KVShape


@dataclass(frozen=True, slots=True)
class NativeKernels:
    """The native kernels that a model uses, and its native attention, if any."""

    library: Library
    pool: NativePool | None = None
    attention: NativeTensorAttention | None = None
    copies: Sequence[WeightCopy] = ()  # copies of the model's weights

    def clear_cache(self) -> None:
        """Drop caches derived from the weights."""
        if self.attention:
            self.attention.clear_cache()

    @property
    def name(self) -> str:
        """Name of the runner, for logs."""
        what = "linears and attention" if self.attention else "linears"
        return f"eager (native {what}, {self.library.variant})"


def with_attention(
    library: Library, dtype: torch.dtype, config: ModelConfig, shape: KVShape
) -> NativeKernels:
    """Enable native attention over pages in kernel order.

    Raises:
        Unsupported: no kernel reads such pages or heads.
    """
    pool = NativePool(shape, dtype)
    attention = NativePagedAttention(library, dtype, pool.layers)
    attention.check(
        AttentionLayer(
            index=0,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            scale=1.0,
        )
    )
    return NativeKernels(library, pool, NativeTensorAttention(attention))

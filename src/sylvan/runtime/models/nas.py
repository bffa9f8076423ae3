"""Nemotron NAS and DeciLM: Llama with layers of different shapes, from architecture search.

A layer may lack attention or mlp, or replace either by a single matrix. At load, key heads are
repeated until all layers have the same number, so that KV pages have one shape; results are equal.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import nn

from sylvan.kernels.api import X
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.linear import Linear
from sylvan.runtime.layers.mlp import GatedMLP
from sylvan.runtime.models.config import (
    ModelConfig,
    NotNative,
    attention_bias,
    common_fields,
    make_config,
)
from sylvan.runtime.models.decoder import Attention, Decoder, Ropes, make_norm

Raw = dict[str, Any]

_MULTIPLE = 256  # granularity of mlp columns


class _Attention(msgspec.Struct, frozen=True):
    """`attention` of a block in config.json."""

    n_heads_in_group: int | None = None
    no_op: bool = False
    replace_with_linear: bool = False
    window_length: int | None = None
    num_sink_tokens: int | None = None


class _Mlp(msgspec.Struct, frozen=True):
    """`ffn` of a block."""

    ffn_mult: float | None = None
    no_op: bool = False
    replace_with_linear: bool = False


class _Block(msgspec.Struct, frozen=True):
    """An entry of `block_configs`."""

    attention: _Attention = _Attention()
    ffn: _Mlp = _Mlp()

    @property
    def attends(self) -> bool:
        """Whether it keeps keys and values."""
        return not (self.attention.no_op or self.attention.replace_with_linear)


def blocks_of(raw: Raw) -> tuple[_Block, ...]:
    """The blocks, from `block_configs` or, of DeciLM 7B, from `num_key_value_heads_per_layer`.

    Raises:
        ConfigError: there is not one for each layer, or it has an impossible field.
    """
    layers, heads = raw.get("num_hidden_layers"), raw.get("num_attention_heads") or 1
    found = raw.get("block_configs")
    if found is None:
        groups = raw.get("num_key_value_heads_per_layer")
        if not isinstance(groups, list) or not all(isinstance(g, int) and g > 0 for g in groups):
            raise ConfigError(
                "config.json: block_configs or num_key_value_heads_per_layer is needed"
            )
        found = [{"attention": {"n_heads_in_group": heads // g}} for g in groups]
    try:
        blocks = msgspec.convert(found, tuple[_Block, ...])
    except msgspec.ValidationError as error:
        raise ConfigError(f"config.json: bad block_configs: {error}") from None
    if len(blocks) != layers:
        raise ConfigError(f"config.json: {len(blocks)} block_configs for {layers} layers")
    for block in blocks:
        size = block.attention.n_heads_in_group
        if block.attends and (not size or size < 1 or heads % size):
            raise ConfigError(f"config.json: n_heads_in_group {size!r} must divide {heads} heads")
        if block.attention.num_sink_tokens or block.attention.window_length:
            raise NotNative("windows that differ between blocks")
    return blocks


def parse(raw: Raw) -> ModelConfig:
    """Read config.json of `DeciLMForCausalLM`."""
    blocks = blocks_of(raw)
    heads = raw.get("num_attention_heads") or 1
    groups = [heads // (b.attention.n_heads_in_group or heads) for b in blocks if b.attends]
    if not groups or any(max(groups) % count for count in groups):
        raise NotNative("layers whose numbers of key heads do not divide each other")
    attending = tuple(layer for layer, block in enumerate(blocks) if block.attends)
    sizes = {
        "num_key_value_heads": max(groups),
        "intermediate_size": raw.get("intermediate_size") or max(_columns(raw, b) for b in blocks),
    }
    fields = attention_bias(raw) | {
        "mlp_bias": bool(raw.get("mlp_bias", False)),
        "attention_layers": attending if len(attending) < len(blocks) else None,
    }
    return make_config(common_fields(raw | sizes) | fields)


def _columns(raw: Raw, block: _Block) -> int:
    """Number of columns of a block's mlp."""
    if block.ffn.ffn_mult is None:
        return raw.get("intermediate_size") or 1
    columns = int(2 * block.ffn.ffn_mult * (raw.get("hidden_size") or 0) / 3)
    return -(-columns // _MULTIPLE) * _MULTIPLE


class LinearAttention(nn.Module):
    """A single matrix instead of attention."""

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        dim = config.hidden_size
        self.linear_attn = Linear(build, dim, (dim,), bias=config.o_bias)

    def forward(self, x_TD: X, batch: ForwardBatch) -> X:
        """Shape: (T, D) -> (T, D)."""
        return self.linear_attn(x_TD)


class LinearMLP(nn.Module):
    """A single matrix instead of the mlp."""

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        dim = config.hidden_size
        self.linear_mlp = Linear(build, dim, (dim,), bias=config.mlp_bias)

    def forward(self, x_TD: X) -> X:
        """Shape: (T, D) -> (T, D)."""
        return self.linear_mlp(x_TD)


class NasBlock(nn.Module):
    """Llama's block without the missing parts."""

    def __init__(
        self, config: ModelConfig, build: Build, layer: int, ropes: Ropes, block: _Block
    ) -> None:
        super().__init__()
        self.input_layernorm = self.self_attn = None
        self.post_attention_layernorm = self.mlp = None
        if not block.attention.no_op:
            self.input_layernorm = make_norm(config, build)
            linear = block.attention.replace_with_linear
            whole = None if linear else Attention(config, build, layer, ropes)
            self.self_attn = whole or LinearAttention(config, build)
        if not block.ffn.no_op:
            self.post_attention_layernorm = make_norm(config, build)
            sizes = config.hidden_size, _columns(config.raw, block)
            if block.ffn.replace_with_linear:
                self.mlp = LinearMLP(config, build)
            else:
                self.mlp = GatedMLP(build, *sizes, config.hidden_act, bias=config.mlp_bias)

    def forward(self, x_TD: X, residual_TD: X | None, batch: ForwardBatch) -> tuple[X, X | None]:
        if self.input_layernorm is not None and self.self_attn is not None:
            x_TD, residual_TD = self.input_layernorm(x_TD, residual_TD)
            x_TD = self.self_attn(x_TD, batch)
        if self.post_attention_layernorm is not None and self.mlp is not None:
            x_TD, residual_TD = self.post_attention_layernorm(x_TD, residual_TD)
            x_TD = self.mlp(x_TD)
        return x_TD, residual_TD


class DeciLM(Decoder):
    """A decoder of these blocks."""

    def block(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> nn.Module:
        return NasBlock(config, build, layer, ropes, blocks_of(config.raw)[layer])

    def convert(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Repeat key heads up to the number of the layer with the most."""
        if ".k_proj." not in name and ".v_proj." not in name:
            return tensor
        heads = tensor.unflatten(0, (-1, self.config.head_dim))
        times = self.config.num_key_value_heads // len(heads)
        return tensor if times == 1 else heads.repeat_interleave(times, 0).flatten(0, 1)


MODEL = DeciLM

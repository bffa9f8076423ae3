"""RecurrentGemma (Griffin): gated linear recurrences, and some window attention layers.

Source: arXiv:2402.19427; the recurrence restarts at position 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from sylvan.kernels import ops
from sylvan.kernels.api import TracedTensor, X
from sylvan.kernels.recurrent import Columns, RgLruLayer, recurrent
from sylvan.kernels.scan.spans import scan
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.linear import ColumnParallel, RowParallel
from sylvan.runtime.layers.mesh import Share, Split
from sylvan.runtime.layers.recurrent import Conv, Recurrent, spans_of, state_of
from sylvan.runtime.models.config import ModelConfig, common_fields, make_config
from sylvan.runtime.models.decoder import FUSED, Attention, Decoder, Ropes, make_mlp
from sylvan.runtime.models.hybrid import HybridBlock, first_part, split_layers

Raw = dict[str, Any]

_SHARPNESS = 8.0  # exponent factor of the recurrence gate


def parse(raw: Raw) -> ModelConfig:
    """Read config.json of `RecurrentGemmaForCausalLM`."""
    layers, width = raw.get("num_hidden_layers") or 0, raw.get("lru_width")
    pattern = raw.get("block_types") or ["recurrent", "recurrent", "attention"]
    kinds = [pattern[layer % len(pattern)] for layer in range(layers)]
    fields = common_fields({"partial_rotary_factor": 0.5, "rope_theta": 10_000.0} | raw)
    dim = raw.get("hidden_size") or 1
    window = raw.get("attention_window_size") or raw.get("sliding_window") or 2048
    parts = ((raw.get("conv1d_width", 4), width or dim), False), ((width or dim,), True)
    bias = bool(raw.get("attention_bias", False))
    found = {
        "intermediate_size": (raw.get("intermediate_size") or 0) // 2,
        "hidden_act": "gelu_tanh",
        "embed_scale": float(torch.tensor(float(dim)).sqrt().bfloat16()),  # as it is stored
        "norm_offset": 1.0,
        "layer_windows": tuple(window if kind == "attention" else None for kind in kinds),
        "logit_softcap": raw.get("logits_soft_cap") or 0.0,
        "qkv_bias": bias,
        "o_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", True)),
    }
    return make_config(fields | split_layers(kinds, parts) | found)


class RgLru(Recurrent):
    """The recurrence, with input and forget gates per block of channels."""

    def __init__(self, build: Build, heads: Share, block: int, part: int) -> None:
        super().__init__()
        width, blocks = heads.times(block), Split(heads)
        self.state_shapes = {part: (width.size,)}
        self._part = part
        self.recurrent_param = build.empty(Split(width))
        self.input_gate_weight = build.empty(blocks, block, block)
        self.input_gate_bias = build.empty(blocks, block)
        self.recurrent_gate_weight = build.empty(blocks, block, block)
        self.recurrent_gate_bias = build.empty(blocks, block)

    @property
    def layer(self) -> RgLruLayer:
        """`forward` as an op of a traced program."""
        return RgLruLayer(
            part=self._part,
            param=self.recurrent_param,
            takes=(self.input_gate_weight, self.input_gate_bias),
            keeps=(self.recurrent_gate_weight, self.recurrent_gate_bias),
        )

    def forward(self, x_TW: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Shape: (T, W) -> (T, W)."""
        blocks = x_TW.unflatten(-1, (len(self.input_gate_weight), -1))
        opened = _gate(blocks, self.input_gate_weight, self.input_gate_bias)
        kept = _gate(blocks, self.recurrent_gate_weight, self.recurrent_gate_bias)
        log_keep = -_SHARPNESS * kept * F.softplus(self.recurrent_param.float())
        first_T1 = batch.positions_T[:, None] == 0
        keep = log_keep.exp().masked_fill(first_T1, 0.0)
        scale = (1 - (2 * log_keep).exp()).sqrt().masked_fill(first_T1, 1.0)
        taken = x_TW.float() * opened * scale

        def step(held: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            new = keep[rows] * held + taken[rows]
            return new, new

        state = state_of(batch, self._part)
        return scan(state, spans_of(batch), torch.empty_like(taken), step).to(x_TW.dtype)


def _gate(x_THB: torch.Tensor, weight_HBB: torch.Tensor, bias_HB: torch.Tensor) -> torch.Tensor:
    """Shape: float32 (T, H B)."""
    return (torch.einsum("thb,hbc->thc", x_THB, weight_HBB) + bias_HB).sigmoid().flatten(1).float()


class RecurrentMixer(nn.Module):
    """The recurrence behind a short convolution, gated. Shape: (T, D) -> (T, D)."""

    def __init__(self, config: ModelConfig, build: Build, layer: int) -> None:
        super().__init__()
        part, dim = first_part(config, layer, 2), config.hidden_size
        taps, whole = config.states[part].shape
        heads = build.mesh.share(config.num_attention_heads, "num_attention_heads")
        block = whole // config.num_attention_heads
        width = heads.times(block)
        self.linear_x = ColumnParallel(build, dim, Split(width), bias=True)
        self.linear_y = ColumnParallel(build, dim, Split(width), bias=True)
        self.conv_1d = Conv(build, Split(width), taps, part, bias=True)
        self.rg_lru = RgLru(build, heads, block, part + 1)
        self.linear_out = RowParallel(build, width, dim, bias=True)

    def forward(self, x_TD: X, batch: ForwardBatch) -> X:
        """Shape: (T, D) -> (T, D)."""
        if isinstance(x_TD, TracedTensor):
            mixed = self.conv_1d.traced(Columns(self.linear_x(x_TD)))
            opened = ops.activation(self.linear_y(x_TD), "gelu_tanh")
            return self.linear_out(recurrent(x_TD).rg_lru(mixed, opened, self.rg_lru.layer))
        assert isinstance(x_TD, torch.Tensor)
        gate = ops.activation(self.linear_y(x_TD), "gelu_tanh")
        return self.linear_out(self.rg_lru(self.conv_1d(self.linear_x(x_TD), batch), batch) * gate)


class RecurrentGemma(Decoder):
    """Maps the tensor names of the checkpoint."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **FUSED,
        "input_layernorm": ("temporal_pre_norm",),
        "post_attention_layernorm": ("channel_pre_norm",),
        "mlp": ("mlp_block",),
        "norm": ("final_norm",),
    }

    def block(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> nn.Module:
        mlp = make_mlp(config, build, layer)
        attends = layer in (config.attention_layers or ())
        mixer: nn.Module = (
            Attention(config, build, layer, ropes)
            if attends
            else RecurrentMixer(config, build, layer)
        )
        return HybridBlock(config, build, "temporal_block", mixer, mlp)


MODEL = RecurrentGemma

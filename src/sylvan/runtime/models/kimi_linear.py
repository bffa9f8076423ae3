"""Kimi Linear: delta nets whose keys decay number by number (KDA), and latent attention (MLA).

Latent attention has no rotary positions, though keys have the columns for them (arXiv:2510.26692).

Shapes: T rows, D hidden, H heads, K numbers of a key or value of a head.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from sylvan.kernels.api import AttentionLayer, TracedTensor, X
from sylvan.kernels.latent import LatentShape
from sylvan.kernels.recurrent import Columns, DeltaLayer, GateRule, recurrent
from sylvan.kernels.scan import DeltaInputs
from sylvan.kernels.scan.delta import EPS
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.latent import LatentAttention
from sylvan.runtime.layers.linear import ColumnParallel, Linear, RowParallel
from sylvan.runtime.layers.mesh import Split
from sylvan.runtime.layers.norm import RMSNorm
from sylvan.runtime.layers.recurrent import (
    Conv,
    DeltaShape,
    Recurrent,
    scan_spans,
    state_of,
)
from sylvan.runtime.models.config import (
    LatentConfig,
    ModelConfig,
    NotNative,
    common_fields,
    make_config,
)
from sylvan.runtime.models.decoder import FUSED, Decoder, Ropes, make_mlp
from sylvan.runtime.models.hybrid import HybridBlock, first_part, split_layers
from sylvan.runtime.models.moe import grouped_experts

Raw = dict[str, Any]

_PARTS = 2  # states of a layer: the convolution's and the memory
_USUAL = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "num_local_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
"""Its own names, and those of other families."""
_SERVED = {"mla_use_nope": True, "moe_router_activation_func": "sigmoid", "moe_layer_freq": 1}
"""Switches that transformers ignores, and the values that its computation is for."""
_EXPERT_PARTS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def parse(raw: Raw) -> ModelConfig:
    """Read config.json of `KimiLinearForCausalLM`.

    Raises:
        ConfigError: layers are not named, or a switch has a value that is not served.
        NotNative: latent attention has biases.
    """
    raw = {usual: raw[own] for own, usual in _USUAL.items() if own in raw} | raw
    if raw.get("attention_bias"):
        raise NotNative("biases in latent attention")
    for name, served in _SERVED.items():
        if raw.get(name, served) != served:
            raise ConfigError(f"config.json: {name} is {raw[name]!r}; only {served!r} is served")
    rope_dim = raw.get("qk_rope_head_dim") or 64
    latent = LatentConfig(
        q_rank=raw.get("q_lora_rank"),
        latent=raw.get("kv_lora_rank") or 512,
        nope=raw.get("qk_nope_head_dim") or 128,
        rope_dim=rope_dim,
        value=raw.get("v_head_dim") or 128,
    )
    kinds = _kinds(raw)
    experts = {"num_local_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1} | raw
    return make_config(
        common_fields(raw | {"head_dim": rope_dim, "num_key_value_heads": 1})
        | split_layers(kinds, _shape(raw).parts)
        | {
            "latent": latent,
            "nope_layers": tuple(range(len(kinds))),
            "attention_scale": (latent.nope + rope_dim) ** -0.5,
            "rms_norm_eps": raw.get("rms_norm_eps", 1e-5),
            "moe": grouped_experts(experts, first=raw.get("first_k_dense_replace", 1)),
        }
    )


def _kinds(raw: Raw) -> list[str]:
    """The kind of each layer; config.json numbers them from 1."""
    layers, named = raw.get("num_hidden_layers") or 0, raw.get("linear_attn_config") or {}
    kinds = raw.get("layer_types")
    if kinds is None and "full_attn_layers" in named:
        full = named["full_attn_layers"]
        kinds = ["full_attention" if i + 1 in full else "linear_attention" for i in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ConfigError(
            "config.json: layer_types must name each layer, or linear_attn_config those that attend"
        )
    return kinds


def _shape(raw: Raw) -> DeltaShape:
    """Sizes of delta nets, nested or not."""
    named = raw.get("linear_attn_config") or {}
    heads = named.get("num_heads") or raw.get("linear_num_heads") or 32
    size = named.get("head_dim") or raw.get("linear_head_dim") or 128
    taps = named.get("short_conv_kernel_size") or raw.get("linear_conv_kernel_dim") or 4
    return DeltaShape(
        dim=raw.get("hidden_size") or 1,
        key_heads=heads,
        value_heads=heads,
        key_dim=size,
        value_dim=size,
        taps=taps,
        eps=raw.get("rms_norm_eps", 1e-5),
    )


class KimiDelta(Recurrent):
    """A gated delta net with a decay per number of a key; ranks share its heads."""

    scans_only = True

    def __init__(self, build: Build, shape: DeltaShape, part: int) -> None:
        super().__init__()
        heads = build.mesh.share(shape.key_heads, "heads of linear attention")
        columns, low = heads.times(shape.key_dim), shape.key_dim
        each, dim = Split(columns), shape.dim
        self._shape = replace(shape, key_heads=heads.size, value_heads=heads.size)
        self._part, self.state_shapes = part, {part + 1: self._shape.parts[1][0]}
        joined = Split(columns, columns, columns)
        self.qkv_proj = ColumnParallel(build, dim, joined)
        self.conv1d = Conv(build, joined, shape.taps, part, bias=False, silu=True)
        self.b_proj = ColumnParallel(build, dim, Split(heads))
        self.f_a_proj = Linear(build, dim, (low,), bias=False)
        self.f_b_proj = ColumnParallel(build, low, each)
        self.g_a_proj = Linear(build, dim, (low,), bias=False)
        self.g_b_proj = ColumnParallel(build, low, each)
        self.A_log, self.dt_bias = build.empty(Split(heads)), build.empty(each)
        self.o_norm = RMSNorm(build, shape.value_dim, shape.eps)
        self.o_proj = RowParallel(build, columns, dim)

    def forward(self, x_TD: X, batch: ForwardBatch) -> X:
        """Shape: (T, D) -> (T, D)."""
        if isinstance(x_TD, TracedTensor):
            return self.o_proj(self._traced(x_TD))
        assert isinstance(x_TD, torch.Tensor)
        mixed = self.conv1d(self.qkv_proj(x_TD), batch)
        q, k, v = (self._heads(part) for part in mixed.chunk(3, -1))
        steps = self.f_b_proj(self.f_a_proj(x_TD)).float() + self.dt_bias.float()
        decay = -self.A_log.float().exp()[:, None] * self._heads(F.softplus(steps))
        inputs = DeltaInputs(q, k, v, decay, self.b_proj(x_TD).sigmoid())
        out_THK = self.scans.delta(inputs, state_of(batch, self._part + 1), scan_spans(batch))
        normed, _ = self.o_norm(out_THK.to(x_TD.dtype).flatten(0, 1))
        gate = self._heads(self.g_b_proj(self.g_a_proj(x_TD)).float().sigmoid())
        out = (normed.float() * gate.flatten(0, 1)).to(x_TD.dtype)
        return self.o_proj(out.view(len(x_TD), -1))

    def _traced(self, x: TracedTensor) -> TracedTensor:
        """Input of the last projection."""
        shape, tracer = self._shape, recurrent(x)
        layer = DeltaLayer(
            part=self._part + 1,
            a_log=self.A_log,
            dt_bias=self.dt_bias,
            key_heads=shape.key_heads,
            key_dim=shape.key_dim,
            value_dim=shape.value_dim,
            eps=EPS,
            by_key=True,
        )
        mixed = self.conv1d.traced(Columns(self.qkv_proj(x)))
        qkv = Columns(mixed), Columns(mixed, shape.keys), Columns(mixed, 2 * shape.keys)
        decay = Columns(self.f_b_proj(self.f_a_proj(x)))
        y = tracer.delta(qkv, Columns(self.b_proj(x)), decay, layer)
        rule = GateRule(
            function="sigmoid",
            norm="before",
            weight=self.o_norm.weight,
            parts=shape.value_heads,
            eps=self.o_norm.eps,
        )
        return tracer.gate(y, Columns(self.g_b_proj(self.g_a_proj(x))), rule)

    def _heads(self, x_TC: torch.Tensor) -> torch.Tensor:
        return x_TC.unflatten(-1, (-1, self._shape.key_dim))


def _attention(config: ModelConfig, build: Build, layer: int) -> LatentAttention:
    sizes = config.latent
    assert sizes is not None
    heads = build.mesh.query_heads(config.num_attention_heads)
    shape = LatentShape(
        num_heads=heads.size,
        nope=sizes.nope,
        rope_dim=sizes.rope_dim,
        value=sizes.value,
        latent=sizes.latent,
    )
    spec = AttentionLayer(
        index=config.kv_index(layer),
        num_heads=heads.size,
        num_kv_heads=1,
        head_dim=sizes.latent + sizes.rope_dim,
        v_head_dim=sizes.latent,
        scale=config.attention_scale or 1.0,
    )
    return LatentAttention(build, config.hidden_size, heads, shape, spec, sizes.q_rank)


class KimiLinear(Decoder):
    """Maps the tensor names of the checkpoint."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **FUSED,
        "conv1d": ("q_conv1d", "k_conv1d", "v_conv1d"),
    }

    def block(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> nn.Module:
        mixer: nn.Module
        if layer in (config.attention_layers or ()):
            mixer = _attention(config, build, layer)
        else:
            mixer = KimiDelta(build, _shape(config.raw), first_part(config, layer, _PARTS))
        return HybridBlock(config, build, "self_attn", mixer, make_mlp(config, build, layer))

    def rename(self, name: str) -> str:
        """Map a checkpoint's tensor name; transformers writes mlps under the name of mixtures."""
        return re.sub(r"\.block_sparse_moe\.(\w+_proj\.)", r".mlp.\1", super().rename(name))

    def source_name(self, source: str) -> str:
        """A mixture has another name than an mlp, and its experts have other parts."""
        source = re.sub(r"\.mlp\.(gate|experts|shared_experts)\.", r".block_sparse_moe.\1.", source)
        stem, found, rest = source.partition(".experts.")
        if not found:
            return source
        return stem + found + re.sub(r"\w+_proj", lambda part: _EXPERT_PARTS[part[0]], rest)

    def convert(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Decays of heads are stored with more dimensions."""
        return tensor.flatten() if name.endswith(".A_log") else tensor


MODEL = KimiLinear

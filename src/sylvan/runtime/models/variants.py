"""Variants of Llama's block: BitNet (inner norms), Apertus (xIELU), nanochat.

BitNet's ternary weights are served as plain numbers from a bfloat16 checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import nn

from sylvan.kernels import ops
from sylvan.kernels.api import X
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.linear import ColumnParallel, RowParallel
from sylvan.runtime.layers.mesh import Split
from sylvan.runtime.layers.mlp import GatedMLP
from sylvan.runtime.layers.norm import RMSNorm
from sylvan.runtime.models.config import ModelConfig, NotNative, common_fields, make_config
from sylvan.runtime.models.decoder import FUSED, Attention, Decoder, PreNorm, Ropes, make_norm

Raw = dict[str, Any]


def parse(raw: Raw) -> ModelConfig:
    """Read config.json of any model served here."""
    bias = bool(raw.get("attention_bias", False))
    found = {"qkv_bias": bias, "o_bias": bias}
    kind = raw.get("hidden_act")
    if "Apertus" in str(raw.get("architectures")):
        if kind not in (None, "xielu"):
            raise NotNative(f"the activation {kind}")
        raw = raw | {"hidden_act": "silu"}  # a placeholder: the model has its own activation
    fields = common_fields(raw)
    return make_config(fields | found | _FAMILIES[fields["architecture"]](raw))


def _bitnet(raw: Raw) -> Raw:
    return {"hidden_act": "relu2"} if raw.get("hidden_act") is None else {}


def _apertus(raw: Raw) -> Raw:
    return {"qk_norm": "head", "rms_norm_eps": raw.get("rms_norm_eps", 1e-5)}


def _nanochat(raw: Raw) -> Raw:
    return _bitnet(raw) | {
        "qk_norm": "unit",
        "norm_weight": False,
        "gated_mlp": False,
        "logit_softcap": raw.get("final_logit_softcapping", 15.0) or 0.0,
    }


_FAMILIES: Mapping[str, Callable[[Raw], Raw]] = MappingProxyType(
    {
        "BitNetForCausalLM": _bitnet,
        "ApertusForCausalLM": _apertus,
        "NanoChatForCausalLM": _nanochat,
    }
)


class NormedAttention(Attention):
    """A norm before the last projection."""

    def __init__(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> None:
        super().__init__(config, build, layer, ropes)
        heads = build.mesh.query_heads(config.num_attention_heads)
        self.attn_sub_norm = RMSNorm(
            build, Split(heads.times(config.head_dim)), config.rms_norm_eps
        )

    def of_rows(self, x_TD: X, batch: ForwardBatch) -> X:
        h_TC, _ = self.attn_sub_norm(self.attn(self.qkv_proj(x_TD), batch))
        return self.o_proj(h_TC)


class NormedMLP(GatedMLP):
    """The same."""

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__(build, config.hidden_size, config.intermediate_size, config.hidden_act)
        inner = build.mesh.share(config.intermediate_size, "intermediate_size")
        self.ffn_sub_norm = RMSNorm(build, Split(inner), config.rms_norm_eps)

    def forward(self, x_TD: X) -> X:
        """Shape: (T, D) -> (T, D)."""
        h_TF, _ = self.ffn_sub_norm(ops.glu(self.gate_up_proj(x_TD), self._act))
        return self.down_proj(h_TF)


class BitNet(Decoder):
    """Llama with these."""

    def block(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> nn.Module:
        block = PreNorm(config, build, layer, ropes)
        block.self_attn = NormedAttention(config, build, layer, ropes)
        block.mlp = NormedMLP(config, build)
        return block


class Xielu(nn.Module):
    """The four parameters of the activation xIELU (arXiv:2411.13010)."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.alpha_p, self.alpha_n = build.empty(1), build.empty(1)
        self.beta, self.eps = build.empty(1), build.empty(1)

    def forward(self, x_TF: X) -> X:
        """Shape: (T, F) -> (T, F)."""
        return ops.xielu(x_TF, self.alpha_p, self.alpha_n, self.beta, self.eps)


class XieluMLP(nn.Module):
    """down(xielu(up(x)))."""

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        self.up_proj = ColumnParallel(build, config.hidden_size, (config.intermediate_size,))
        self.down_proj = RowParallel(build, config.intermediate_size, config.hidden_size)
        self.act_fn = Xielu(build)

    def forward(self, x_TD: X) -> X:
        """Shape: (T, D) -> (T, D)."""
        return self.down_proj(self.act_fn(self.up_proj(x_TD)))


class Apertus(Decoder):
    """Norms with other names."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **FUSED,
        "input_layernorm": ("attention_layernorm",),
        "post_attention_layernorm": ("feedforward_layernorm",),
    }

    def block(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> nn.Module:
        block = PreNorm(config, build, layer, ropes)
        block.mlp = XieluMLP(config, build)
        return block

    def convert(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Some numbers are stored without a dimension."""
        return tensor.reshape(1) if ".act_fn." in name else tensor


class NanoChat(Decoder):
    """Norms without weights, also on embeddings; heads are rotated in the opposite direction."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **FUSED,
        "up_proj": ("fc1",),
        "down_proj": ("fc2",),
    }

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__(config, build)
        self.embed_norm = make_norm(config, build)

    def embed(self, batch: ForwardBatch) -> X:
        return self.embed_norm(super().embed(batch))[0]

    def convert(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Swap the halves of rotated heads, which reverses the direction."""
        if ".q_proj." not in name and ".k_proj." not in name:
            return tensor
        halves = tensor.unflatten(0, (-1, 2, self.config.head_dim // 2))
        return halves.flip(1).flatten(0, 2)


_MODELS: Mapping[str, type[Decoder]] = MappingProxyType(
    {
        "BitNetForCausalLM": BitNet,
        "ApertusForCausalLM": Apertus,
        "NanoChatForCausalLM": NanoChat,
    }
)


def _model(config: ModelConfig, build: Build) -> Decoder:
    """Select the class that matches the tensor names of the checkpoint."""
    return _MODELS[config.architecture](config, build)


MODEL = _model

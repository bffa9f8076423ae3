"""T5, Flan-T5, mT5 and UMT5: a decoder with cross-attention to the encoded prompt.

Instead of positions, learned biases are added to scores by distance; queries are not scaled
(arXiv:1910.10683, section 2.1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from sylvan.kernels.api import AttentionLayer, AttentionVariant, X
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.layers.attention import SpecialAttention
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.cross import CrossAttention, CrossShape
from sylvan.runtime.layers.linear import ColumnParallel, RowParallel
from sylvan.runtime.layers.mesh import Share, Split
from sylvan.runtime.models.config import (
    ModelConfig,
    architecture_of,
    common_fields,
    make_config,
)
from sylvan.runtime.models.decoder import Decoder, Ropes, make_mlp, make_norm
from sylvan.runtime.models.encoder_decoder import text_media

Raw = dict[str, Any]

_DEFAULTS = {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128}
_BUCKETS, _FARTHEST = _DEFAULTS
_BIAS = ".relative_attention_bias.weight"


def parse(raw: Raw) -> ModelConfig:
    """Read config.json.

    Raises:
        ConfigError: An option is not supported.
    """
    gate, _, act = str(raw.get("feed_forward_proj", "relu")).rpartition("-")
    if gate not in ("", "gated"):
        raise ConfigError(f"config.json: feed_forward_proj is {raw['feed_forward_proj']!r}")
    width, heads = raw.get("d_model") or 0, raw.get("num_heads") or 0
    sizes = {
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": raw.get("d_kv"),
        "num_hidden_layers": raw.get("num_decoder_layers") or raw.get("num_layers"),
        "intermediate_size": raw.get("d_ff"),
        "hidden_act": "gelu_new" if gate and act == "gelu" else act,
        "max_position_embeddings": raw.get("n_positions") or 512,
    }
    fields = common_fields(raw | sizes)
    tied = raw.get("tie_word_embeddings") is not False
    mt5 = architecture_of(raw).startswith("MT5")
    scaled = bool(raw.get("scale_decoder_outputs", tied)) and not mt5
    return make_config(
        fields
        | {
            "rms_norm_eps": raw.get("layer_norm_epsilon", 1e-6),
            "gated_mlp": bool(gate),
            "attention_scale": 1.0,
            "nope_layers": tuple(range(fields["num_hidden_layers"] or 0)),
            "tie_word_embeddings": tied,
            "logit_scale": float(width) ** -0.5 if scaled else 1.0,
            "media": text_media(raw, fields["architecture"]),
        }
    )


def distance_buckets(buckets: int, farthest: int) -> torch.Tensor:
    """Bucket of each distance to an earlier token, up to `farthest`, int64 (farthest + 1,).

    Small distances have a bucket each, larger ones share them by the logarithm.
    """
    exact = buckets // 2
    distance = torch.arange(farthest + 1)
    ratio = torch.log(distance.clamp(min=1).float() / exact) / math.log(farthest / exact)
    far = (exact + (ratio * (buckets - exact)).long()).clamp(max=buckets - 1)
    return torch.where(distance < exact, distance, far)


class DistanceBias(nn.Module):
    """Biases of each head's scores by distance; the last one also applies to greater distances.

    Attributes:
        weight: (heads of this rank * distances,).
    """

    def __init__(self, build: Build, heads: Share, distances: int) -> None:
        super().__init__()
        self.weight = build.empty(Split(heads.times(distances)))


class BiasedAttention(nn.Module):
    """Attention with relative position biases; `bias` None: this layer has its own."""

    def __init__(
        self, config: ModelConfig, build: Build, layer: int, bias: DistanceBias | None
    ) -> None:
        super().__init__()
        heads = build.mesh.heads(config.num_attention_heads, config.num_key_value_heads)
        queries, keys = (share.times(config.head_dim) for share in heads)
        parts = Split(queries, keys, keys)
        self.qkv_proj = ColumnParallel(build, config.hidden_size, parts)
        self.o_proj = RowParallel(build, queries, config.hidden_size)
        if bias is None:
            distances = _number(config.raw, _FARTHEST) + 1
            bias = DistanceBias(build, heads.queries, distances)
            self.relative_attention_bias = bias
        spec = AttentionLayer(
            index=config.kv_index(layer),
            num_heads=heads.queries.size,
            num_kv_heads=heads.keys.size,
            head_dim=config.head_dim,
            scale=1.0,
        )
        self.attn = SpecialAttention(spec, None, None, None, AttentionVariant(biases=bias.weight))

    def forward(self, x_TD: X, batch: ForwardBatch) -> X:
        return self.o_proj(self.attn(self.qkv_proj(x_TD), batch))


class T5Block(nn.Module):
    """Attention to the answer so far, attention to the prompt, feed-forward: each after a norm."""

    def __init__(
        self, config: ModelConfig, build: Build, layer: int, bias: DistanceBias | None
    ) -> None:
        super().__init__()
        self.input_layernorm = make_norm(config, build)
        self.self_attn = BiasedAttention(config, build, layer, bias)
        self.encoder_attn_layer_norm = make_norm(config, build)
        shape = CrossShape(
            dim=config.hidden_size,
            num_heads=config.num_attention_heads,
            head_dim=config.head_dim,
            bias=False,
            scale=1.0,
        )
        self.encoder_attn = CrossAttention(build, layer, shape)
        self.post_attention_layernorm = make_norm(config, build)
        self.mlp = make_mlp(config, build, layer)

    def forward(self, x_TD: X, residual_TD: X | None, batch: ForwardBatch) -> tuple[X, X]:
        h_TD, stream_TD = self.input_layernorm(x_TD, residual_TD)
        h_TD, stream_TD = self.encoder_attn_layer_norm(self.self_attn(h_TD, batch), stream_TD)
        h_TD, stream_TD = self.post_attention_layernorm(self.encoder_attn(h_TD, batch), stream_TD)
        return self.mlp(h_TD), stream_TD


class T5(Decoder):
    """The decoder; in UMT5 each layer has its own biases, else all use those of the first layer."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "embed_tokens": ("shared",),
        "layers": ("block",),
        "self_attn": ("layer.0.SelfAttention",),
        "input_layernorm": ("layer.0.layer_norm",),
        "qkv_proj": ("q", "k", "v"),
        "o_proj": ("o",),
        "encoder_attn": ("layer.1.EncDecAttention",),
        "encoder_attn_layer_norm": ("layer.1.layer_norm",),
        "q_proj": ("q",),
        "k_proj": ("k",),
        "v_proj": ("v",),
        "out_proj": ("o",),
        "mlp": ("layer.2.DenseReluDense",),
        "post_attention_layernorm": ("layer.2.layer_norm",),
        "gate_up_proj": ("wi_0", "wi_1"),
        "up_proj": ("wi",),
        "down_proj": ("wo",),
        "norm": ("final_layer_norm",),
    }

    def __init__(self, config: ModelConfig, build: Build) -> None:
        self._shared: list[DistanceBias] = []  # a list, so that PyTorch does not register it twice
        super().__init__(config, build)

    def block(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> nn.Module:
        own = not self._shared or config.architecture.startswith("UMT5")
        block = T5Block(config, build, layer, None if own else self._shared[0])
        if own:
            self._shared = [block.self_attn.relative_attention_bias]
        return block

    @property
    def unused(self) -> tuple[str, ...]:
        """Name prefixes of the encoder, loaded separately, and of copies of the shared table."""
        return ("encoder.", "embed_tokens.")

    def rename(self, name: str) -> str:
        """Strip the prefix from a tensor name of the checkpoint."""
        return name.removeprefix("decoder.")

    def convert(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Spread the biases of buckets over distances. Shape: (buckets, N) to (N distances,)."""
        if not name.endswith(_BIAS):
            return tensor
        raw = self.config.raw
        found = distance_buckets(_number(raw, _BUCKETS), _number(raw, _FARTHEST))
        return tensor[found].T.flatten()


def _number(raw: Raw, name: str) -> int:
    return int(raw.get(name) or _DEFAULTS[name])


MODEL = T5

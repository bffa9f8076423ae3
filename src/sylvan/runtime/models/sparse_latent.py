"""DeepSeek V3.2 and GLM-5: DeepSeek V3 whose rows attend to the tokens that an indexer selects.

GLM-5 lets some layers take the choice of the one before (`indexer_types`).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from sylvan.kernels.api import TracedTensor, Unsupported, X
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.latent import LatentAttention
from sylvan.runtime.layers.sparse import Chosen, IndexShape, SparseLatentAttention
from sylvan.runtime.models import deepseek
from sylvan.runtime.models.config import ModelConfig
from sylvan.runtime.models.decoder import Decoder, Ropes
from sylvan.runtime.models.deepseek import LatentBlock

Raw = dict[str, Any]


def parse(raw: Raw) -> ModelConfig:
    """Read config.json of `DeepseekV32ForCausalLM` and `GlmMoeDsaForCausalLM`.

    Raises:
        ConfigError: as DeepSeek V3, or the index is impossible.
    """
    config = deepseek.parse(raw)
    for name in ("index_n_heads", "index_head_dim", "index_topk"):
        value = raw.get(name, 1)
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"config.json: {name} must be a positive integer, it is {value!r}")
    if config.latent is None or config.latent.index < config.latent.turning:
        raise ConfigError("config.json: index_head_dim must hold the columns that turn")
    kinds = _choosing(raw, config.num_hidden_layers)
    if len(kinds) != config.num_hidden_layers or not kinds[0]:
        raise ConfigError("config.json: indexer_types must begin with a layer that chooses")
    return config


def _choosing(raw: Raw, layers: int) -> list[bool]:
    """Whether each layer has an index of its own."""
    kinds = raw.get("indexer_types") or ["full"] * layers
    return [kind != "shared" for kind in kinds] if isinstance(kinds, list) else []


class SparseBlock(LatentBlock):
    """Passes the choice on to the next layer."""

    attention: ClassVar[type[LatentAttention]] = SparseLatentAttention

    def __init__(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> None:
        super().__init__(config, build, layer, ropes)
        assert config.latent is not None
        raw = config.raw
        shape = IndexShape(
            heads=raw.get("index_n_heads") or (64 if config.architecture[0] == "D" else 32),
            columns=config.latent.index,
            top_k=raw.get("index_topk") or 2048,
            interleaved=config.architecture == "GlmMoeDsaForCausalLM",
        )
        own = _choosing(raw, config.num_hidden_layers)[layer]
        assert isinstance(self.self_attn, SparseLatentAttention)
        self.self_attn.index_by(build, config.hidden_size, shape, own=own)

    def run(
        self,
        x_TD: torch.Tensor,
        residual_TD: torch.Tensor | None,
        batch: ForwardBatch,
        chosen: Chosen | None,
    ) -> tuple[torch.Tensor, torch.Tensor, Chosen | None]:
        """As `forward`, with the choice of the layer before."""
        assert isinstance(self.self_attn, SparseLatentAttention)
        h_TD, stream_TD = self.input_layernorm(x_TD, residual_TD)
        h_TD, chosen = self.self_attn.attend(h_TD, batch, chosen)
        h_TD, stream_TD = self.post_attention_layernorm(h_TD, stream_TD)
        return self.mlp(h_TD), stream_TD, chosen


class SparseDeepseek(Decoder):
    """A decoder of these blocks."""

    def block(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> nn.Module:
        return SparseBlock(config, build, layer, ropes)

    def forward(self, x_TD: X, batch: ForwardBatch) -> X:
        """Hidden vectors after the final norm. Shape: (T, D)."""
        if isinstance(x_TD, TracedTensor):
            raise Unsupported("attention to tokens that an indexer selects")
        assert isinstance(x_TD, torch.Tensor)
        h_TD, residual_TD, chosen = x_TD, None, None
        for block in self.layers:
            assert isinstance(block, SparseBlock)
            h_TD, residual_TD, chosen = block.run(h_TD, residual_TD, batch, chosen)
        return self.norm(h_TD, residual_TD)[0]


MODEL = SparseDeepseek

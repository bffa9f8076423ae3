"""DeepSeek V3.2 and GLM-5: DeepSeek V3 with sparse attention to tokens that an indexer selects.

In GLM-5 some layers reuse the selection of the previous layer (`indexer_types`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from sylvan.kernels.api import TracedTensor, X
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
        ConfigError: See `deepseek`; or sizes of the indexer are impossible.
    """
    config = deepseek.parse(raw)
    for name in ("index_n_heads", "index_head_dim", "index_topk"):
        value = raw.get(name, 1)
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"config.json: {name} must be a positive integer, it is {value!r}")
    if config.latent is None or config.latent.index < config.latent.rope_dim:
        raise ConfigError("config.json: index_head_dim must be at least qk_rope_head_dim")
    kinds = _has_indexer(raw, config.num_hidden_layers)
    if len(kinds) != config.num_hidden_layers or not kinds[0]:
        raise ConfigError(
            "config.json: indexer_types must have an entry per layer, the first not 'shared'"
        )
    return config


def _has_indexer(raw: Raw, layers: int) -> list[bool]:
    """Whether each layer has its own indexer."""
    kinds = raw.get("indexer_types") or ["full"] * layers
    return [kind != "shared" for kind in kinds] if isinstance(kinds, list) else []


@dataclass(slots=True)
class Choice:
    """The latest selection in a step, as tensors or as values of a traced program."""

    tokens: Chosen | None = None
    traced: TracedTensor | None = None


class SparseBlock(LatentBlock):
    """A block that passes the selection on to the next layer."""

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
        own = _has_indexer(raw, config.num_hidden_layers)[layer]
        assert isinstance(self.self_attn, SparseLatentAttention)
        self.self_attn.index_by(build, config.hidden_size, shape, own=own)

    def forward(
        self, x_TD: X, residual_TD: X | None, batch: ForwardBatch, choice: Choice | None = None
    ) -> tuple[X, X]:
        """As other blocks; reads the selection of the previous layer and stores its own."""
        attention, choice = self.self_attn, choice or Choice()
        assert isinstance(attention, SparseLatentAttention)
        h_TD, stream_TD = self.input_layernorm(x_TD, residual_TD)
        made: Any
        if isinstance(h_TD, TracedTensor):
            made, choice.traced = attention.traced(h_TD, choice.traced)
        else:
            made, choice.tokens = attention.attend(h_TD, batch, choice.tokens)
        h_TD, stream_TD = self.post_attention_layernorm(made, stream_TD)
        return self.mlp(h_TD), stream_TD


class SparseDeepseek(Decoder):
    """A decoder of these blocks."""

    def block(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> nn.Module:
        return SparseBlock(config, build, layer, ropes)

    def forward(self, x_TD: X, batch: ForwardBatch) -> X:
        """Hidden vectors after the final norm. Shape: (T, D)."""
        residual_TD, choice = None, Choice()
        for block in self.layers:
            x_TD, residual_TD = block(x_TD, residual_TD, batch, choice)
        return self.norm(x_TD, residual_TD)[0]


MODEL = SparseDeepseek

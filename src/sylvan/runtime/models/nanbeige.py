"""Nanbeige: Llama; from 4.2 on, all layers run several times, and each pass has its own KV.

The final norm is also applied between passes (`skip_loop_final_norm`).
"""

from __future__ import annotations

from typing import Any

import msgspec
from torch import nn

from sylvan.kernels.api import X
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.layers.build import Build
from sylvan.runtime.models import llama
from sylvan.runtime.models.config import ModelConfig
from sylvan.runtime.models.decoder import Decoder, PreNorm, Ropes

Raw = dict[str, Any]

_UNKNOWN = (
    *("enable_double_loop_split", "loop_share_kv", "enable_hyper_connection", "enable_mhc"),
    *("enable_depth_attention", "ngram_insert_all_layers", "qk_layernorm"),
    *("insert_ngram_layer_idx", "emb_neighbor_num"),
)
"""Switches that no published checkpoint sets."""
_MAX_PASSES = 64


def parse(raw: Raw) -> ModelConfig:
    """Read config.json of `NanbeigeForCausalLM`; layers are counted once for each pass.

    Raises:
        ConfigError: a switch is set as in no published checkpoint, or passes are impossible.
    """
    for name in _UNKNOWN:
        if raw.get(name):
            raise ConfigError(f"config.json: {name} {raw[name]!r}, as in no published checkpoint")
    count, layers = passes_of(raw), raw.get("num_hidden_layers")
    if not isinstance(layers, int):
        raise ConfigError(f"config.json: num_hidden_layers must be an integer, it is {layers!r}")
    config = llama.parse(raw | {"num_hidden_layers": count * layers})
    return msgspec.structs.replace(config, raw=raw)


def passes_of(raw: Raw) -> int:
    """How often all layers run."""
    weights = raw.get("loop_loss_weights")
    count = len(weights) + 1 if isinstance(weights, list) and weights else raw.get("num_loops", 1)
    if not isinstance(count, int) or not 1 <= count <= _MAX_PASSES:
        raise ConfigError(f"config.json: num_loops must be in 1..{_MAX_PASSES}, it is {count!r}")
    return count


class Nanbeige(Decoder):
    """Blocks of later passes have the weights of the first."""

    def __init__(self, config: ModelConfig, build: Build) -> None:
        passes = passes_of(config.raw)
        if build.mesh.stage.count > 1 and passes > 1:
            raise ConfigError(
                f"parallel.pp={build.mesh.stage.count}: {config.architecture} runs its layers "
                f"{passes} times, which pipeline stages do not support; use parallel.pp=1"
            )
        self._first: list[PreNorm] = []
        self._each = config.num_hidden_layers // passes
        self._norms_between = not config.raw.get("skip_loop_final_norm", False)
        super().__init__(config, build)

    def block(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> nn.Module:
        block = PreNorm(config, build, layer, ropes)
        if layer < self._each:
            self._first.append(block)
            return block
        same = self._first[layer % self._each]
        block.input_layernorm, block.mlp = same.input_layernorm, same.mlp
        block.post_attention_layernorm = same.post_attention_layernorm
        block.self_attn.qkv_proj = same.self_attn.qkv_proj
        block.self_attn.o_proj = same.self_attn.o_proj
        return block

    def forward(self, x_TD: X, batch: ForwardBatch) -> X:
        """Hidden vectors after the final norm. Shape: (T, D)."""
        residual_TD: X | None = None
        for layer, block in enumerate(self.layers):
            if layer and layer % self._each == 0 and self._norms_between:
                x_TD, residual_TD = self.norm(x_TD, residual_TD)[0], None
            x_TD, residual_TD = block(x_TD, residual_TD, batch)
        return self.norm(x_TD, residual_TD)[0]


MODEL = Nanbeige

"""Layers behind the last one that guess further tokens, as checkpoints bring them (MTP, NextN).

DeepSeek V3 and R1, GLM-4.5 and GLM-4.7-Flash: layer N of a model with N layers reads, at position
p, the embedding of the token at p + 1 and the model's last vector at p, each normed by itself.

Shapes: T rows, R rows whose logits are wanted, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from sylvan.kernels import ops
from sylvan.kernels.api import X
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.embedding import Embedding
from sylvan.runtime.layers.linear import ColumnParallel
from sylvan.runtime.layers.norm import RMSNorm
from sylvan.runtime.models.checkpoint import load_weights
from sylvan.runtime.models.config import ModelConfig
from sylvan.runtime.models.decoder import FUSED, Ropes
from sylvan.runtime.models.files import LoadFormat
from sylvan.runtime.models.registry import family_of

FAMILIES = ("DeepseekV3ForCausalLM", "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM")
"""Architectures whose checkpoints name that layer alike."""


class NextHead(nn.Module):
    """One such layer, with the parameters of its checkpoint.

    Args:
        config: Of the model.
        build: What it is built with.
    """

    fused = FUSED
    unused = ("",)  # all of the model besides this layer

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        last, dim, eps = config.num_hidden_layers, config.hidden_size, config.rms_norm_eps
        longer = with_next_layer(config)
        skeleton = replace(build, device=torch.device("meta"))
        family: Any = family_of(config).model(config, skeleton)
        block = family.block(longer, build, last, Ropes(longer, build))
        block.enorm, block.hnorm = RMSNorm(build, dim, eps), RMSNorm(build, dim, eps)
        block.eh_proj = ColumnParallel(build, 2 * dim, (dim,))
        block.shared_head = _SharedHead(config, build)
        self.embed_tokens = Embedding(build, config.vocab_size, dim)
        self.layers = nn.ModuleDict({str(last): block})
        self._block, self._build = block, build

    def load(self, model_dir: Path, load_format: LoadFormat = "auto") -> None:
        """Fill it from the checkpoint of the model.

        Raises:
            ConfigError: the checkpoint does not have it, or quantised; names the tensor.
        """
        load_weights(self, model_dir, load_format=load_format)
        block, whole = self._block, self._block.eh_proj.weight
        if not isinstance(whole, torch.Tensor):
            raise ConfigError(
                f"speculative.algorithm=nextn: {str(model_dir)!r} has eh_proj quantised; that of "
                "a checkpoint with plain numbers can be used"
            )
        dim = whole.shape[0]
        block.embed_proj, block.hidden_proj = (
            ColumnParallel(self._build, dim, (dim,)) for _ in range(2)
        )
        block.embed_proj.weight = nn.Parameter(whole[:, :dim].clone(), requires_grad=False)
        block.hidden_proj.weight = nn.Parameter(whole[:, dim:].clone(), requires_grad=False)
        del block.eh_proj

    def fuse(self, read_TF: X) -> X:
        """See `EagleHead.fuse`."""
        return read_TF

    def forward(self, hidden_TD: X, batch: ForwardBatch) -> tuple[X, X]:
        """See `EagleHead.forward`."""
        block = self._block
        embeds_TD, _ = block.enorm(self.embed_tokens(batch.input_ids_T))
        normed_TD, _ = block.hnorm(hidden_TD)
        x_TD = ops.add(block.embed_proj(embeds_TD), block.hidden_proj(normed_TD))
        x_TD, residual_TD = block(x_TD, None, batch)
        out_TD, _ = block.shared_head.norm(x_TD, residual_TD)
        return out_TD, out_TD

    def head(self, rows_RD: X) -> X:
        """See `EagleHead.head`. Shape: (R, D) -> float32 (R, V)."""
        return self._block.shared_head.head(rows_RD, out_f32=True)


class _SharedHead(nn.Module):
    """A norm and a matrix of the vocabulary; in published checkpoints that of the model again."""

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        self.norm = RMSNorm(build, config.hidden_size, config.rms_norm_eps)
        self.head = ColumnParallel(build, config.hidden_size, (config.vocab_size,))


def with_next_layer(config: ModelConfig) -> ModelConfig:
    """The model with its guessing layer as one more, which is as the last one is.

    Raises:
        ConfigError: it has none, or one of another kind.
    """
    raw: Mapping[str, Any] = config.raw
    if config.architecture not in FAMILIES:
        raise ConfigError(
            f"speculative.algorithm=nextn: layers of {config.architecture} that guess further "
            f"tokens are not served; those of {', '.join(FAMILIES)} are"
        )
    if not raw.get("num_nextn_predict_layers"):
        raise ConfigError(
            "speculative.algorithm=nextn: this model has no layer that guesses further tokens "
            "(num_nextn_predict_layers in its config.json)"
        )
    last, moe = config.num_hidden_layers, config.moe
    if moe is not None:
        moe = msgspec.structs.replace(moe, layers=(*moe.layers, last))
    return msgspec.structs.replace(
        config,
        num_hidden_layers=last + 1,
        layer_windows=(*config.layer_windows, config.layer_windows[-1]),
        moe=moe,
    )

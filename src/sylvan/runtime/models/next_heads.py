"""Multi-token prediction layers in checkpoints (MTP, NextN), used for drafting.

DeepSeek V3 and R1, GLM-4.5 and GLM-4.7-Flash, MiMo, Qwen3-Next, ERNIE 4.5: an additional layer
reads, at position p, the embedding of the token at p + 1 and the model's last vector at p, each
with its own norm. Families differ in names, and in what the layer shares with the model.

Shapes: T rows, R rows that need logits, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
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
from sylvan.runtime.models.checkpoint import load_weights
from sylvan.runtime.models.config import ModelConfig
from sylvan.runtime.models.decoder import FUSED, Ropes, make_norm
from sylvan.runtime.models.files import LoadFormat
from sylvan.runtime.models.registry import family_of


@dataclass(frozen=True, kw_only=True, slots=True)
class NextLayout:
    """Tensor names of such a layer; `{last}` is its number.

    Attributes:
        block: Prefix of its attention and feed-forward tensors.
        embed_norm, hidden_norm: Norms of its two inputs.
        joined: Matrix over both inputs.
        hidden_first: Whether the vector precedes the embedding in that matrix.
        norm: Norm before the vocabulary matrix; None without one.
        head: Vocabulary matrix; None to use the model's.
        sparse: Whether it has experts like the model.
        counted: Whether config.json has their number (`num_nextn_predict_layers`).
    """

    block: str
    embed_norm: str
    hidden_norm: str
    joined: str
    norm: str | None
    hidden_first: bool = False
    head: str | None = None
    sparse: bool = True
    counted: bool = True


_DEEPSEEK = NextLayout(
    block="layers.{last}.",
    embed_norm="layers.{last}.enorm",
    hidden_norm="layers.{last}.hnorm",
    joined="layers.{last}.eh_proj",
    norm="layers.{last}.shared_head.norm",
    head="layers.{last}.shared_head.head",
)
_MIMO = NextLayout(
    block="mtp_layers.0.",
    embed_norm="mtp_layers.0.token_layernorm",
    hidden_norm="mtp_layers.0.hidden_layernorm",
    joined="mtp_layers.0.input_proj",
    norm="mtp_layers.0.final_layernorm",
    hidden_first=True,
)
_QWEN = NextLayout(
    block="mtp.layers.0.",
    embed_norm="mtp.pre_fc_norm_embedding",
    hidden_norm="mtp.pre_fc_norm_hidden",
    joined="mtp.fc",
    norm="mtp.norm",
    counted=False,
)
_ERNIE = NextLayout(
    block="mtp_block.0.",
    embed_norm="mtp_emb_norm.0",
    hidden_norm="mtp_hidden_norm.0",
    joined="mtp_linear_proj.0",
    norm=None,
    sparse=False,
)

FAMILIES: Mapping[str, NextLayout] = MappingProxyType(
    {
        "DeepseekV3ForCausalLM": _DEEPSEEK,
        "Glm4MoeForCausalLM": _DEEPSEEK,
        "Glm4MoeLiteForCausalLM": _DEEPSEEK,
        "MiMoForCausalLM": _MIMO,
        "Qwen3NextForCausalLM": _QWEN,
        "Ernie4_5_MoeForCausalLM": _ERNIE,
    }
)
"""Layouts by architecture. Sources: the models' code on Hugging Face, loaders in SGLang."""


class NextHead(nn.Module):
    """A prediction layer, with the parameters of its checkpoint.

    Args:
        config: The model's config.
        build: Build options.
    """

    unused = ("",)  # ignore all other tensors of the model

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        last, dim = config.num_hidden_layers, config.hidden_size
        longer = with_next_layer(config)
        self._layout, self._last = FAMILIES[config.architecture], last
        self._tied = config.tie_word_embeddings
        skeleton = replace(build, device=torch.device("meta"))
        family: Any = family_of(config).model(config, skeleton)
        self.fused: Mapping[str, tuple[str, ...]] = getattr(family, "fused", FUSED)
        self.embed_tokens = Embedding(build, config.vocab_size, dim, config.embed_scale)
        self.embed_norm, self.hidden_norm = make_norm(config, build), make_norm(config, build)
        self.eh_proj = ColumnParallel(build, 2 * dim, (dim,))
        self.layers = nn.ModuleList([family.block(longer, build, last, Ropes(longer, build))])
        self.last_norm = make_norm(config, build) if self._layout.norm else None
        self.lm_head = ColumnParallel(build, dim, (config.vocab_size,))
        self._build = build

    def source_name(self, source: str) -> str:
        """The checkpoint's name of a tensor."""
        layout = self._layout
        shared = "embed_tokens" if self._tied else "lm_head"
        starts = {
            "embed_norm.": f"{layout.embed_norm}.",
            "hidden_norm.": f"{layout.hidden_norm}.",
            "eh_proj.": f"{layout.joined}.",
            "last_norm.": f"{layout.norm}.",
            "lm_head.": f"{layout.head or shared}.",
            "layers.0.": layout.block,
        }
        for mine, theirs in starts.items():
            if source.startswith(mine):
                return theirs.format(last=self._last) + source.removeprefix(mine)
        return source

    def load(self, model_dir: Path, load_format: LoadFormat = "auto") -> None:
        """Load the layer from the model's checkpoint.

        Raises:
            ConfigError: the checkpoint lacks it, or has it quantised; names the tensor.
        """
        load_weights(self, model_dir, load_format=load_format)
        whole = self.eh_proj.weight
        if not isinstance(whole, torch.Tensor):
            raise ConfigError(
                f"speculative.algorithm=nextn: {self._layout.joined} is quantised in "
                f"{str(model_dir)!r}; use a checkpoint in which it is not"
            )
        dim = whole.shape[0]
        self.embed_proj, self.hidden_proj = (
            ColumnParallel(self._build, dim, (dim,)) for _ in range(2)
        )
        halves = whole[:, :dim].clone(), whole[:, dim:].clone()
        embed, hidden = reversed(halves) if self._layout.hidden_first else halves
        self.embed_proj.weight = nn.Parameter(embed, requires_grad=False)
        self.hidden_proj.weight = nn.Parameter(hidden, requires_grad=False)
        del self.eh_proj

    def fuse(self, read_TF: X) -> X:
        return read_TF

    def forward(self, hidden_TD: X, batch: ForwardBatch) -> tuple[X, X]:
        embeds_TD, _ = self.embed_norm(self.embed_tokens(batch.input_ids_T))
        normed_TD, _ = self.hidden_norm(hidden_TD)
        x_TD = ops.add(self.embed_proj(embeds_TD), self.hidden_proj(normed_TD))
        x_TD, residual_TD = self.layers[0](x_TD, None, batch)
        if self.last_norm is None:
            out_TD = ops.add(x_TD, residual_TD)
        else:
            out_TD, _ = self.last_norm(x_TD, residual_TD)
        return out_TD, out_TD

    def head(self, rows_RD: X) -> X:
        """Shape: (R, D) -> float32 (R, V)."""
        return self.lm_head(rows_RD, out_f32=True)


def with_next_layer(config: ModelConfig) -> ModelConfig:
    """The model's config with the prediction layer appended as an attention layer.

    Raises:
        ConfigError: the model has none, or an unsupported one.
    """
    raw: Mapping[str, Any] = config.raw
    layout = FAMILIES.get(config.architecture)
    if layout is None:
        raise ConfigError(
            f"speculative.algorithm=nextn: multi-token prediction layers of {config.architecture} "
            f"are not supported; those of {', '.join(FAMILIES)} are"
        )
    if layout.counted and not raw.get("num_nextn_predict_layers"):
        raise ConfigError(
            "speculative.algorithm=nextn: this model has no multi-token prediction layer "
            "(num_nextn_predict_layers in its config.json)"
        )
    last, moe = config.num_hidden_layers, config.moe
    if moe is not None and layout.sparse:
        moe = msgspec.structs.replace(moe, layers=(*moe.layers, last))
    attending = config.attention_layers
    return msgspec.structs.replace(
        config,
        num_hidden_layers=last + 1,
        layer_windows=(*config.layer_windows, config.layer_windows[-1]),
        attention_layers=None if attending is None else (*attending, last),
        moe=moe,
    )

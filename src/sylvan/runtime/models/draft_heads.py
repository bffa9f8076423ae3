"""Draft heads that predict the model's next tokens from its hidden vectors: EAGLE 1 to 3.

A head reads, at position p, the token at p + 1 and the model's vectors at p, and predicts the token
at p + 2. Its output approximates what the model would compute there, so it can continue from its
own draft tokens.

Shapes: T rows, R rows that need logits, F columns read from the model, D hidden size of
the head, V vocabulary of the model, W tokens that the head can draft.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

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
from sylvan.runtime.layers.mlp import GatedMLP
from sylvan.runtime.layers.norm import RMSNorm
from sylvan.runtime.models.config import ModelConfig, common_fields, make_config, read_config
from sylvan.runtime.models.decoder import Attention, Ropes
from sylvan.runtime.models.files import LoadFormat, open_weights

Kind = Literal["eagle", "eagle3"]

_QKV = "self_attn.qkv_proj"
_HALVES = ("embed_fc", "hidden_fc", "embed_qkv")
"""Halves of a published matrix: the columns for embeddings, then those for vectors."""
_SOURCES: Mapping[str, tuple[str, ...]] = {
    "embed_fc": ("fc",),
    "hidden_fc": ("fc",),
    _QKV: ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "embed_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
"""Published matrices that fill a parameter, stacked by rows."""


class DraftHeadConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of a head, and what it reads.

    Attributes:
        kind: Kind of head; EAGLE and EAGLE-2 have the same head.
        layer: Sizes of its only layer; its vocabulary is the model's.
        draft_vocab_size: Number of tokens that it can draft.
        read_layers: Layers of the model whose outputs it reads; empty: vectors after the final
          norm.
        columns: Columns read at each position.
        has_embedding: Whether it has its own embedding table; otherwise it uses the model's.
        has_head: Whether it has its own output head; otherwise it uses the model's.
    """

    kind: Kind
    layer: ModelConfig
    draft_vocab_size: int
    read_layers: tuple[int, ...]
    columns: int
    has_embedding: bool
    has_head: bool


class EagleHead(nn.Module):
    """EAGLE-1 and EAGLE-2: a layer without a first norm on the joined embedding and vector."""

    def __init__(self, config: DraftHeadConfig, build: Build) -> None:
        super().__init__()
        layer = config.layer
        dim = layer.hidden_size
        self.embed_tokens = Embedding(build, layer.vocab_size, dim)
        self.embed_fc = ColumnParallel(build, dim, (dim,), bias=True)
        self.hidden_fc = ColumnParallel(build, config.columns, (dim,))
        self.self_attn = Attention(layer, build, 0, Ropes(layer, build))
        self.post_attention_layernorm = RMSNorm(build, dim, layer.rms_norm_eps)
        self.mlp = GatedMLP(build, dim, layer.intermediate_size, layer.hidden_act, bias=False)
        self.lm_head = ColumnParallel(build, dim, (config.draft_vocab_size,))

    def fuse(self, read_TF: X) -> X:
        """Combine the vectors read from the model for `forward`. Shape: (T, F) -> (T, D)."""
        return read_TF

    def forward(self, hidden_TD: X, batch: ForwardBatch) -> tuple[X, X]:
        """Return the input of `head` and approximate vectors of the next positions: (T, D)."""
        like = self.post_attention_layernorm.weight
        embeds_TD = ops.cast(self.embed_tokens(batch.input_ids_T), like)
        x_TD = ops.add(self.embed_fc(embeds_TD), self.hidden_fc(hidden_TD))
        attended_TD = self.self_attn(x_TD, batch)
        h_TD, stream_TD = self.post_attention_layernorm(attended_TD, x_TD)
        out_TD = ops.add(self.mlp(h_TD), stream_TD)
        return out_TD, out_TD

    def head(self, rows_RD: X) -> X:
        """Logits of the tokens that can be drafted: float32 (R, W)."""
        return self.lm_head(rows_RD, out_f32=True)


class Eagle3Head(nn.Module):
    """EAGLE-3: reads several layers; norms the embedding and the vector separately."""

    def __init__(self, config: DraftHeadConfig, build: Build) -> None:
        super().__init__()
        layer = config.layer
        dim, eps = layer.hidden_size, layer.rms_norm_eps
        self.embed_tokens = Embedding(build, layer.vocab_size, dim)
        self.fc = ColumnParallel(build, config.columns, (dim,))
        self.input_layernorm = RMSNorm(build, dim, eps)
        self.hidden_norm = RMSNorm(build, dim, eps)
        self.self_attn = Attention(layer, build, 0, Ropes(layer, build))
        parts = (layer.q_dim, layer.kv_dim, layer.kv_dim)
        self.embed_qkv = ColumnParallel(build, dim, parts)
        self.post_attention_layernorm = RMSNorm(build, dim, eps)
        self.mlp = GatedMLP(build, dim, layer.intermediate_size, layer.hidden_act, bias=False)
        self.norm = RMSNorm(build, dim, eps)
        self.lm_head = ColumnParallel(build, dim, (config.draft_vocab_size,))

    def fuse(self, read_TF: X) -> X:
        return self.fc(read_TF)

    def forward(self, hidden_TD: X, batch: ForwardBatch) -> tuple[X, X]:
        embeds_TD, _ = self.input_layernorm(self.embed_tokens(batch.input_ids_T))
        normed_TD, _ = self.hidden_norm(hidden_TD)
        attn = self.self_attn
        qkv = ops.add(attn.qkv_proj(normed_TD), self.embed_qkv(embeds_TD))
        attended_TD = attn.o_proj(attn.attn(qkv, batch))
        h_TD, stream_TD = self.post_attention_layernorm(attended_TD, hidden_TD)
        return self.norm(self.mlp(h_TD), stream_TD)

    def head(self, rows_RD: X) -> X:
        return self.lm_head(rows_RD, out_f32=True)


DraftHead = EagleHead | Eagle3Head


class HeadCheckpoint:
    """The files of a head: its config and tensors, with names common to both kinds.

    Raises:
        ConfigError: not a head, or not for this model; names the file, field or tensor.
    """

    def __init__(self, path: Path, model: ModelConfig) -> None:
        self._path = path
        self._files = open_weights(path)
        self._names = {_plain(name): name for name in self._files.tensors}
        self.config = self._parse(read_config(path), model)

    def load(self, head: DraftHead, borrow: Callable[[str], torch.Tensor]) -> None:
        """Fill the parameters of `head`.

        Args:
            head: Built from `config`.
            borrow: Returns a tensor of the model, `embed_tokens.weight` or `lm_head.weight`.
        """
        config, dim = self.config, self.config.layer.hidden_size
        own = {"embed_tokens.weight": config.has_embedding, "lm_head.weight": config.has_head}
        for name, parameter in head.named_parameters():
            found = self._content(name, dim) if own.get(name, True) else borrow(name)
            if found.shape != parameter.shape:
                raise self._error(
                    f"tensor {name!r} has shape {list(found.shape)}, but it should have "
                    f"{list(parameter.shape)}"
                )
            parameter.data.copy_(found)

    def token_ids(self) -> torch.Tensor | None:
        """Ids of the tokens that the head can draft, int64 (W,); None: all, in order.

        Raises:
            ConfigError: the map names ids that the model does not have.
        """
        if "d2t" not in self._names:
            return None
        count, vocab = self.config.draft_vocab_size, self.config.layer.vocab_size
        offsets = self._files.tensor(self._names["d2t"]).long()
        if offsets.shape != (count,):
            raise self._error(f"tensor 'd2t' has shape {list(offsets.shape)}, not {[count]}")
        ids = torch.arange(count) + offsets
        if ids.min() < 0 or ids.max() >= vocab:
            raise self._error(f"tensor 'd2t' leads to ids that are not in 0..{vocab - 1}")
        return ids

    def _content(self, name: str, dim: int) -> torch.Tensor:
        """Read the contents of a parameter."""
        stem, _, end = name.rpartition(".")
        if name == "embed_fc.bias" and "fc.bias" not in self._names:
            return torch.zeros(dim)
        parts = [self._tensor(f"{part}.{end}") for part in _SOURCES.get(stem, (stem,))]
        whole = torch.cat(parts) if len(parts) > 1 else parts[0]
        halved = stem in _HALVES or (stem == _QKV and self.config.kind == "eagle3")
        if end == "bias" or not halved:
            return whole
        return whole[:, :dim] if stem.startswith("embed_") else whole[:, dim:]

    def _tensor(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise self._error(f"tensor {name!r} is missing")
        return self._files.tensor(self._names[name])

    def _parse(self, raw: dict[str, Any], model: ModelConfig) -> DraftHeadConfig:
        kind = self._kind()
        fields = common_fields(raw) | {
            "num_hidden_layers": 1,
            "qkv_bias": "self_attn.q_proj.bias" in self._names,
        }
        layer = make_config(fields)
        read = model.hidden_size
        if layer.vocab_size != model.vocab_size:
            raise self._error(
                f"it was made for a vocabulary of {layer.vocab_size} tokens, the model has "
                f"{model.vocab_size}"
            )
        own = raw.get("target_hidden_size") or (read if kind == "eagle3" else layer.hidden_size)
        if own != read:
            raise self._error(f"it reads vectors of {own} columns, those of the model have {read}")
        layers = () if kind == "eagle" else read_layers(raw, model.num_hidden_layers, self._path)
        columns = read * (len(layers) or 1)
        if kind == "eagle3" and (given := tuple(self._tensor("fc.weight").shape)) != (
            wanted := (layer.hidden_size, columns)
        ):
            raise self._error(
                f"tensor 'fc.weight' has shape {list(given)}; for layers {list(layers)} of this "
                f"model it should have {list(wanted)}"
            )
        has_head = "lm_head.weight" in self._names and kind == "eagle3"
        drafted = layer.vocab_size
        if has_head:
            drafted = self._tensor("lm_head.weight").shape[0]
        if drafted != layer.vocab_size and "d2t" not in self._names:
            raise self._error(
                f"it drafts {drafted} of {layer.vocab_size} tokens, but the map of their ids "
                "(tensor 'd2t') is missing"
            )
        return DraftHeadConfig(
            kind=kind,
            layer=layer,
            draft_vocab_size=drafted,
            read_layers=layers,
            columns=columns,
            has_embedding="embed_tokens.weight" in self._names,
            has_head=has_head,
        )

    def _kind(self) -> Kind:
        if "fc.weight" not in self._names:
            raise self._error("it has no tensor 'fc.weight', so it is not an EAGLE head")
        if any(name.startswith("layers.") for name in self._names):
            raise self._error("it has more than one layer; only heads with one layer are supported")
        return "eagle3" if "hidden_norm.weight" in self._names else "eagle"

    def _error(self, why: str) -> ConfigError:
        return ConfigError(f"speculative.draft_model={self._path}: {why}")


def read_layers(raw: Mapping[str, Any], num_layers: int, path: Path) -> tuple[int, ...]:
    """Layers of the model whose outputs an EAGLE-3 head reads: as configured, or the defaults.

    Raises:
        ConfigError: the model does not have these layers.
    """
    given = raw.get("eagle_config")
    named = given.get("eagle_aux_hidden_state_layer_ids") if isinstance(given, dict) else None
    if named is None:
        found = default_layers(num_layers)
    elif isinstance(named, list) and named and all(isinstance(n, int) for n in named):
        found = tuple(named)
    else:
        raise ConfigError(
            f"speculative.draft_model={path}: config.json: eagle_aux_hidden_state_layer_ids must "
            f"be a list of layers, it is {named!r}"
        )
    if any(not 0 <= layer < num_layers for layer in found):
        raise ConfigError(
            f"speculative.draft_model={path}: it reads layers {list(found)}, the model has "
            f"{num_layers}"
        )
    return found


def default_layers(num_layers: int) -> tuple[int, ...]:
    """An early, a middle and a late layer for a model of that depth, as EAGLE-3 uses."""
    last = num_layers - 1
    return min(1, last), max(0, num_layers // 2 - 1), max(0, num_layers - 4)


def model_tensor(
    name: str, model_dir: Path, model: ModelConfig, load_format: LoadFormat = "auto"
) -> torch.Tensor:
    """Read a tensor of the model that a head shares.

    Args:
        name: `embed_tokens.weight`, `lm_head.weight` or `norm.weight`.
        model_dir: The model's directory.
        model: The model's config.
        load_format: Load format of its files.

    Raises:
        ConfigError: the model has no such tensor.
    """
    files = open_weights(model_dir, load_format)
    is_tied = model.tie_word_embeddings and name == "lm_head.weight"
    tied = ("embed_tokens.weight",) if is_tied else ()
    for wanted in (name, *tied):
        for prefix in ("", "model."):
            if prefix + wanted in files.tensors:
                return files.tensor(prefix + wanted)
    raise ConfigError(
        f"a draft head would share the tensor {name!r} with the model, but {str(model_dir)!r} has "
        "none of plain numbers"
    )


def make_head(config: DraftHeadConfig, build: Build) -> DraftHead:
    """Build the module of a head, without weights."""
    return (EagleHead if config.kind == "eagle" else Eagle3Head)(config, build)


def _plain(name: str) -> str:
    """Strip prefixes that differ between publishers of the same head."""
    for prefix in ("model.", "midlayer.", "layers.0."):
        name = name.removeprefix(prefix)
    return name

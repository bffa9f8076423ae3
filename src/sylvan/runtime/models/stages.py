"""Divides a model into pipeline stages, each with some of its layers."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import Any

import msgspec
from torch import nn

from sylvan.kernels.api import AttentionLayer, X
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.layers.stage import Stage
from sylvan.runtime.models.config import ModelConfig
from sylvan.runtime.models.decoder import Decoder
from sylvan.runtime.models.groups import kv_groups
from sylvan.runtime.models.slots import slots


class AbsentLayer(nn.Module):
    """Placeholder for a layer or norm of another stage: returns its input."""

    def forward(
        self, x_TD: X, residual_TD: X | None = None, batch: ForwardBatch | None = None
    ) -> tuple[X, X | None]:
        del batch
        return x_TD, residual_TD


def check_stages(config: ModelConfig, count: int) -> None:
    """Check that a model can be divided into this many stages.

    Raises:
        ConfigError: It cannot; the message says why, and how many stages are possible.
    """
    if count == 1:
        return
    pp = f"parallel.pp={count}"
    media = config.media
    reasons = {
        "runs through transformers": config.path != "native",
        "has bidirectional attention": not config.causal,
        "has cross-attention": media is not None and media.cross,
        "adds image vectors in several layers": media is not None and bool(media.edited_layers),
    }
    why = next((why for why, is_so in reasons.items() if is_so), "")
    if why:
        raise ConfigError(
            f"{pp}: {config.architecture} {why}, which pipeline stages do not support; use "
            "parallel.pp=1"
        )
    layers = config.num_hidden_layers
    if count > layers:
        raise ConfigError(f"{pp}: this model has {layers} layers; use at most as many stages")
    if not num_last_layers(config, count):
        raise ConfigError(
            f"{pp}: some stages would have no layers with a window, none without, or none that "
            "attend; use fewer"
        )


def num_last_layers(config: ModelConfig, count: int) -> int:
    """Number of layers of the last stage, which also computes the head, to balance the stages.

    More, up to an equal share, if another stage would otherwise lack a kind of KV that the model
    has; 0 if one lacks it even then.
    """
    layers, kinds = config.num_hidden_layers, [group.window for group in kv_groups(config)]
    head = config.vocab_size * config.hidden_size / max(1, _layer_weights(config))

    def longest(last: int) -> tuple[float, int]:
        return max(last + head, ceil((layers - last) / (count - 1))), -last

    fewest = min(range(1, layers // count + 1), key=longest, default=1)
    for last in range(fewest, layers // count + 1):
        stages = [Stage(number, count, layers, last) for number in range(count)]
        parts = [[g.window for g in kv_groups(stage_config(config, stage))] for stage in stages]
        if all(part == kinds for part in parts):
            return last
    return 0


def _layer_weights(config: ModelConfig) -> int:
    """Approximate number of weights that a token is multiplied by in a layer."""
    dim, latent, moe = config.hidden_size, config.latent, config.moe
    keys = 2 * config.kv_dim if latent is None else latent.kept
    inner = config.intermediate_size if moe is None else moe.top_k * moe.inner + moe.shared
    return dim * (2 * config.q_dim + keys + (3 if config.gated_mlp else 2) * inner)


def stage_config(config: ModelConfig, stage: Stage) -> ModelConfig:
    """Config that describes the stage's layers only, for the layout of its KV."""
    if stage.count == 1:
        return config
    own, attending = stage.layers, config.attention_layers
    if attending is not None:
        attending = tuple(layer - own.start for layer in attending if layer in own)
    return msgspec.structs.replace(
        config,
        num_hidden_layers=len(own),
        attention_layers=attending,
        layer_windows=config.layer_windows[own.start : own.stop],
    )


def cut(model: Any, stage: Stage) -> Any:
    """Remove the layers of other stages from a model whose weights are not loaded; return it.

    Raises:
        ConfigError: its layers pass on more than the residual stream.
    """
    if stage.count == 1:
        return model
    if not isinstance(model, Decoder) or not model.has_one_stream:
        raise ConfigError(
            f"parallel.pp={stage.count}: layers of {model.config.architecture} pass on more than "
            "one stream; use parallel.pp=1"
        )
    whole = _modules_read(model)
    left: Any = model  # placeholders replace the removed modules
    layers, own = model.layers, stage.layers
    attending = model.config.attention_layers or range(len(layers))
    before = sum(layer < own.start for layer in attending)
    for layer in range(len(layers)):
        if layer in own:
            _move_pages(layers[layer], before)
        else:
            layers[layer] = AbsentLayer()
    if not stage.is_last:
        left.norm, left.lm_head, left.score = AbsentLayer(), None, None
        left.words = None  # the head of `bert_decoder`
    if not stage.is_first:
        model.embed_positions = None
        if not (stage.is_last and model.config.tie_word_embeddings):
            left.embed_tokens = AbsentLayer()
    model.absent = tuple(sorted(whole - _modules_read(model)))
    return model


def _modules_read(model: nn.Module) -> set[str]:
    """Name prefixes of the checkpoint tensors that a model reads."""
    names = (name for slot in slots(model) for name in (*slot.sources, *slot.elsewhere))
    return {f"{name.rpartition('.')[0]}." for name in names}


def _move_pages(block: nn.Module, first: int) -> None:
    """Number the KV of a stage's layers from 0; `first`: layers with KV before them."""
    for module in block.modules():
        for name, value in [*vars(module).items()]:
            if isinstance(value, AttentionLayer):
                setattr(module, name, replace(value, index=value.index - first))

"""KV groups: which attention layers of a model can share pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sylvan.runtime.models.config import ModelConfig

GroupKind = Literal["full", "latent", "window"]


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Attention layers that need the KV of the same tokens.

    They share a page table and page numbers. Recurrent layers belong to no group.

    Attributes:
        kind: `window`: only the newest `window` tokens are read again; `latent`: compressed KV.
        layers: Indices among the layers with keys and values.
        window: Number of newest tokens that a token attends to, including itself; None: all.
        columns: Numbers per token of a layer; 0: as the other groups.
    """

    kind: GroupKind
    layers: tuple[int, ...]
    window: int | None = None
    columns: int = 0


def kv_groups(config: ModelConfig) -> tuple[LayerGroup, ...]:
    """The groups of a model: full attention first, then windows, narrow ones first.

    Gemma 2 and 3, gpt-oss and similar models have two groups; Mistral 7B v0.1 and Phi-3, whose
    layers all have the same window, have one. Empty without attention layers.
    """
    if not config.causal or not config.kv_layers:
        return ()
    every = config.attention_layers or range(config.num_hidden_layers)
    windows = [config.layer_windows[layer] for layer in every]
    found = tuple(
        _group(config, tuple(i for i, w in enumerate(windows) if w == window), window)
        for window in sorted(set(windows), key=lambda w: (w is not None, w or 0))
    )
    if config.compressed is None or not config.compressed.layers:
        return found
    entries = tuple(range(len(windows), config.kv_layers))
    return (LayerGroup("latent", entries, columns=config.compressed.columns), *found)


def _group(config: ModelConfig, layers: tuple[int, ...], window: int | None) -> LayerGroup:
    kind = "window" if window is not None else "latent" if config.latent else "full"
    return LayerGroup(kind, layers, window)

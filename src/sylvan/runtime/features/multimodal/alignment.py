"""Alignment of text tokens with audio, from smoothed weights of alignment heads.

As in OpenAI's published code of Whisper (`whisper/timing.py`). Times are made of it in
`sylvan.text.word_times`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.core.forward import CrossAttentionRecorder
from sylvan.runtime.models.config import ModelConfig
from sylvan.utils.json_files import read_json

_USUAL_WIDTH = 7


class Alignment:
    """Reads a checkpoint's heads (`alignment_heads` of generation_config.json).

    Without any, all heads of the later half of layers count.

    Raises:
        ConfigError: a head does not exist, or the width of the filter is even.
    """

    def __init__(self, model_dir: Path, config: ModelConfig) -> None:
        layers, heads = config.num_hidden_layers, config.num_attention_heads
        found: dict[int, list[int]] = {}
        for layer, head in _configured_heads(model_dir) or (
            (layer, head) for layer in range(layers // 2, layers) for head in range(heads)
        ):
            if not (0 <= layer < layers and 0 <= head < heads):
                raise ConfigError(
                    f"generation_config.json: alignment_heads has head {head} of layer {layer}, "
                    f"of {heads} heads in {layers} layers"
                )
            found.setdefault(layer, []).append(head)
        self.heads: Mapping[int, tuple[int, ...]] = {at: tuple(of) for at, of in found.items()}
        self._width = int(config.raw.get("median_filter_width", _USUAL_WIDTH))
        if self._width < 1 or self._width % 2 == 0:
            raise ConfigError("config.json: median_filter_width must be odd")

    def recorder(self, num_vectors: int) -> CrossAttentionRecorder:
        """Return a recorder of a prompt's attention to the first vectors of its item."""
        return CrossAttentionRecorder(self.heads, num_vectors)

    def weights(self, recorder: CrossAttentionRecorder) -> np.ndarray:
        """Return the mean of all heads, float32 (rows, vectors)."""
        parts = [torch.cat(recorder.weights[layer], 1) for layer in sorted(recorder.weights)]
        heads_NTS = torch.cat(parts)
        std, mean = torch.std_mean(heads_NTS, dim=-2, keepdim=True, correction=0)
        return _median(((heads_NTS - mean) / std).nan_to_num(), self._width).mean(0).cpu().numpy()


def _median(x: torch.Tensor, width: int) -> torch.Tensor:
    """Median of `width` neighbours along the last dimension, mirrored at its ends."""
    pad = width // 2
    if x.shape[-1] <= pad:
        return x
    return functional.pad(x, (pad, pad), mode="reflect").unfold(-1, width, 1).sort()[0][..., pad]


def _configured_heads(model_dir: Path) -> Sequence[tuple[int, int]]:
    try:
        raw: Any = read_json(model_dir / "generation_config.json")
    except (OSError, ValueError):
        return ()
    pairs = raw.get("alignment_heads") if isinstance(raw, dict) else None
    return [(int(layer), int(head)) for layer, head in pairs or ()]

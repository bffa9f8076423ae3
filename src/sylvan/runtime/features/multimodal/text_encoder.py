"""Runs the text encoder of an encoder-decoder model (T5, BART, Marian, NLLB) in transformers.

The decoder's cross-attention reads the encoder's output. Florence-2's encoder also reads the images
of a prompt, whose embeddings replace their placeholders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from sylvan.protocol.errors import ConfigError
from sylvan.protocol.media import TEXT_IDS, MediaKind
from sylvan.runtime.models.config import ModelConfig, ModelMedia
from sylvan.utils.json_files import read_json

PIXELS = "pixel_values"
"""Name of the images among the features of a text."""
_SEES = "florence2"
_NO_DECODER = ("decoder_layers", "num_decoder_layers")
"""Fields of config.json with the number of decoder layers, which are not loaded."""


class PromptEncoder:
    """Implements `MediaEncoder` with transformers; encodes each text alone, without padding.

    Args:
        model_dir: Directory of the checkpoint.
        dtype: dtype of the model.
        dummy: Random weights instead of the checkpoint's.

    Raises:
        ConfigError: transformers is not installed, or cannot build or load the encoder.
    """

    def __init__(self, model_dir: Path, dtype: torch.dtype, *, dummy: bool = False) -> None:
        try:
            self._model = _load(model_dir, dtype, dummy=dummy)
            self._encoder: nn.Module = self._model.get_encoder()
        except ImportError as error:
            raise ConfigError(
                f"the encoder of this model runs through transformers, which is missing ({error}); "
                "install sylvan[multimodal]"
            ) from None
        except (ValueError, KeyError, OSError, RuntimeError, AttributeError) as error:
            raise ConfigError(f"the encoder of this model cannot be loaded: {error}") from None

    def encode(self, kind: MediaKind, features: Mapping[str, np.ndarray]) -> Sequence[torch.Tensor]:
        if kind != "text":
            raise ValueError(f"this model encodes texts, no {kind}")
        ids_1N = torch.from_numpy(np.ascontiguousarray(features[TEXT_IDS], np.int64))[None]
        if (pixels := features.get(PIXELS)) is None:
            return [self._encoder(input_ids=ids_1N).last_hidden_state[0]]
        x_1ND = self._with_images(ids_1N, torch.from_numpy(np.ascontiguousarray(pixels)))
        return [self._encoder(inputs_embeds=x_1ND).last_hidden_state[0]]

    def _with_images(self, ids_1N: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of a text, with those of its images at their placeholders."""
        model: Any = self._model
        x_1ND = model.get_input_embeddings()(ids_1N)
        seen = model.get_image_features(pixels.to(x_1ND.dtype)).pooler_output
        places = (ids_1N == model.config.image_token_id)[..., None]
        if int(places.sum()) * x_1ND.shape[-1] != seen.numel():
            raise ValueError(f"there are {seen.flatten(0, -2).shape[0]} vectors for its images")
        return x_1ND.masked_scatter(places, seen)


def decoder_prompt(media: ModelMedia, model_dir: Path) -> tuple[int, ...]:
    """Return the decoder's first tokens; generation_config.json overrides config.json.

    The first id is the start token; a forced first token of the answer follows, such as BART's
    `<s>` or the language of a translator.
    """
    start, *forced = media.decoder_prompt
    try:
        said = read_json(model_dir / "generation_config.json")
    except (OSError, ValueError):
        said = {}
    if not isinstance(said, dict):
        said = {}
    given: Any = said.get("decoder_start_token_id")
    first: Any = said.get("forced_bos_token_id")
    return (
        given if isinstance(given, int) else start,
        *([first] if isinstance(first, int) else forced),
    )


def encoder_facts(model: ModelConfig, model_dir: Path, context_len: int) -> dict[str, str | int]:
    """Return the encoder's properties for the API process; empty: there is no encoder.

    Args:
        model: The model's config.
        model_dir: Directory of the checkpoint.
        context_len: Most tokens of the decoder.
    """
    media = model.media
    if media is None or not media.decoder_prompt:
        return {}
    prompt = ",".join(map(str, decoder_prompt(media, model_dir)))
    return {"decoder_prompt": prompt, "encoder_len": media.encoder_len or context_len}


def _load(model_dir: Path, dtype: torch.dtype, *, dummy: bool) -> Any:
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoModelForSeq2SeqLM
    from transformers.utils import logging as their_logging

    config: Any = AutoConfig.from_pretrained(model_dir)
    sees = config.model_type == _SEES
    text = config.text_config if sees else config
    for name in _NO_DECODER:
        if hasattr(text, name):
            setattr(text, name, 0)
    level = their_logging.get_verbosity()
    their_logging.set_verbosity_error()  # it would log each layer that is not loaded
    kind: Any = AutoModelForImageTextToText if sees else AutoModelForSeq2SeqLM
    try:
        if dummy:
            model = kind.from_config(config).to(dtype)
        else:
            model = kind.from_pretrained(model_dir, config=config, dtype=dtype)
    finally:
        their_logging.set_verbosity(level)
    return model.eval().requires_grad_(requires_grad=False)

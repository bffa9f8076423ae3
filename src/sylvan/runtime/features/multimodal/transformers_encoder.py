"""Runs a checkpoint's encoder in transformers, without its language model."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from sylvan.protocol.errors import ConfigError
from sylvan.protocol.media import MediaKind
from sylvan.runtime.features.multimodal.equal_images import encode_equal_images_once
from sylvan.runtime.features.multimodal.native_blocks import use_native_blocks

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")

_METHODS: Mapping[MediaKind, str] = {
    "image": "get_image_features",
    "video": "get_video_features",
    "audio": "get_audio_features",
}
_DUAL_ENCODERS = frozenset({"clip", "siglip", "siglip2"})
"""Models with one encoder of texts and another of images."""
_RETRIEVERS = frozenset({"colmodernvbert", "colpali", "colqwen2"})


class TransformersEncoder:
    """Implements `MediaEncoder`.

    Args:
        model_dir: Directory of the checkpoint.
        dtype: dtype of the model.
        dummy: Random weights instead of the checkpoint's.
        native: Whether native kernels compute the blocks that they support; CPUs only.
        device: Device of the encoder.

    Attributes:
        native_blocks: Number of native blocks.

    Raises:
        ConfigError: transformers is not installed, or cannot build or load the encoder.
    """

    def __init__(
        self,
        model_dir: Path,
        dtype: torch.dtype,
        *,
        dummy: bool = False,
        native: bool = False,
        device: torch.device = _CPU,
    ) -> None:
        try:
            model = _load(model_dir, dtype, dummy=dummy)
        except ImportError as error:
            raise ConfigError(
                f"the encoder of this model runs through transformers, which is missing ({error}); "
                "install sylvan[multimodal]"
            ) from None
        except (ValueError, KeyError, OSError, RuntimeError, AttributeError) as error:
            raise ConfigError(f"the encoder of this model cannot be loaded: {error}") from None
        _skip_pooling(model)
        self._model: Any = model.to(device)
        self._dtype, self._device = dtype, device
        self.native_blocks = 0
        if native:
            self.native_blocks = use_native_blocks(model, dtype, torch.get_num_threads())
            logger.info("native kernels compute %d blocks of the encoder", self.native_blocks)
        encode_equal_images_once(model)

    def encode(self, kind: MediaKind, features: Mapping[str, np.ndarray]) -> Sequence[torch.Tensor]:
        method = self._method(kind)
        forward = method.forward if isinstance(method, nn.Module) else method
        known = inspect.signature(forward).parameters
        takes_all = all(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in known.values())
        given = {
            name: self._tensor(array)
            for name, array in features.items()
            if takes_all or name in known
        }
        found = method(**given)
        deep = getattr(found, "deepstack_features", None) or ()
        return [_rows(vectors).cpu() for vectors in (_vectors(found), *deep)]

    def _qwen2_audio(
        self, input_features: torch.Tensor, feature_attention_mask: torch.Tensor
    ) -> torch.Tensor:
        """Run Qwen2-Audio's encoder as its forward does: transformers has no method for it."""
        from transformers.masking_utils import create_bidirectional_mask

        inner: Any = self._model.model
        tower = inner.audio_tower
        inside = (feature_attention_mask.sum(-1) - 1) // 2 + 1  # length after its convolutions
        outside = (inside - 2) // 2 + 1  # length after its pooling
        length = (input_features.shape[-1] - 2) // 2 + 1
        places = torch.arange(length, device=self._device)
        seen = (places[None] < inside[:, None]).long()
        like = torch.zeros((len(seen), length, 1), dtype=self._dtype, device=self._device)
        mask = create_bidirectional_mask(
            config=tower.config, inputs_embeds=like, attention_mask=seen
        )
        found = tower(input_features, attention_mask=mask).last_hidden_state
        return inner.multi_modal_projector(found)[0, : int(outside[0])]

    def _phi4_images(
        self,
        image_pixel_values: torch.Tensor,
        image_sizes: torch.Tensor,
        image_attention_mask: torch.Tensor,
        num_img_tokens: torch.Tensor,
    ) -> torch.Tensor:
        """Run Phi-4-multimodal's encoder, which writes into a prompt of placeholders."""
        embed = self._model.get_submodule("model.embed_tokens_extend.image_embed")
        token = self._model.config.vision_config.image_token_id
        ids, nothing = self._placeholders(token, num_img_tokens)
        return embed(
            ids,
            nothing,
            image_pixel_values=image_pixel_values,
            image_sizes=image_sizes,
            image_attention_mask=image_attention_mask,
        )

    def _phi4_sounds(
        self,
        audio_input_features: torch.Tensor,
        audio_embed_sizes: torch.Tensor,
        audio_attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `_phi4_images`, with the projection for prompts without images."""
        embed = self._model.get_submodule("model.embed_tokens_extend.audio_embed")
        token = self._model.config.audio_config.audio_token_id
        ids, nothing = self._placeholders(token, audio_embed_sizes)
        return embed(
            ids,
            nothing,
            audio_input_features=audio_input_features,
            audio_embed_sizes=audio_embed_sizes,
            audio_attention_mask=audio_attention_mask,
        )

    def _placeholders(self, token: int, count: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids of a prompt, (1, N), and empty embeddings."""
        ids = torch.full((1, int(count.sum())), token, device=self._device)
        width = self._model.config.hidden_size
        return ids, torch.zeros(*ids.shape, width, dtype=self._dtype, device=self._device)

    def _mllama(
        self,
        pixel_values: torch.Tensor,
        aspect_ratio_ids: torch.Tensor,
        aspect_ratio_mask: torch.Tensor,
    ) -> torch.Tensor:
        """Run Llama 3.2's encoder, without the padding tiles of an image."""
        inner: Any = self._model.model
        tiles = inner.vision_model(
            pixel_values=pixel_values,
            aspect_ratio_ids=aspect_ratio_ids,
            aspect_ratio_mask=aspect_ratio_mask,
        ).last_hidden_state
        return inner.multi_modal_projector(tiles)[aspect_ratio_mask.bool()]

    def _modernvbert(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Run ModernVBERT's encoder, then the norm behind the embeddings of its text part."""
        inner: Any = self._model.vlm
        rows = _rows(inner.get_image_features(pixel_values).pooler_output)
        return inner.text_model.embeddings.norm(rows)

    def _llama4(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Run Llama 4's encoder as its forward does: the method for images omits the projector."""
        inner: Any = self._model
        inner = getattr(inner, "model", inner)
        tiles = inner.get_image_features(pixel_values).last_hidden_state
        return inner.multi_modal_projector(tiles.flatten(0, -2))

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        kept = self._dtype if tensor.is_floating_point() else tensor.dtype
        return tensor.to(self._device, kept)

    def _method(self, kind: MediaKind) -> Callable[..., Any]:
        name = _METHODS[kind]
        model: Any = self._model
        config: Any = model.config
        own = {
            ("colmodernvbert", "image"): self._modernvbert,
            ("llama4", "image"): self._llama4,
            ("mllama", "image"): self._mllama,
            ("phi4_multimodal", "audio"): self._phi4_sounds,
            ("phi4_multimodal", "image"): self._phi4_images,
            ("qwen2_audio", "audio"): self._qwen2_audio,
        }.get((config.model_type, kind))
        if own is not None:
            return own
        for holder in (getattr(model, "model", None), getattr(model, "vlm", None), model):
            if hasattr(holder, name):
                return getattr(holder, name)
        if config.is_encoder_decoder:
            return model.get_encoder()
        raise ValueError(f"{type(model).__name__} encodes no {kind}")


def _vectors(found: Any) -> Any:
    """Return the embeddings from a transformers output, bare or in a structure."""
    if isinstance(found, torch.Tensor | list | tuple):
        return found
    pooled = getattr(found, "pooler_output", None)
    heard = getattr(found, "attention_mask", None)  # of sounds with padding (Gemma 4)
    if pooled is not None and heard is not None:
        return pooled[heard.bool()]
    return found.last_hidden_state if pooled is None else pooled


def _rows(vectors: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate the embeddings of one tensor or several. Shape: (N, D)."""
    if not isinstance(vectors, torch.Tensor):
        vectors = torch.cat([part.flatten(0, -2) for part in vectors])
    return vectors.flatten(0, -2)


def _skip_pooling(model: Any) -> None:
    """Leave out the pooling head of a tower whose hidden states are used (LLaVA).

    transformers computes it if the checkpoint has one, which can take longer than all layers.
    """
    if hasattr(model.config, "vision_feature_layer"):
        for module in model.modules():
            if getattr(module, "use_head", False):
                module.use_head = False


def _load(model_dir: Path, dtype: torch.dtype, *, dummy: bool) -> nn.Module:
    from transformers import (
        AutoConfig,
        AutoModel,
        AutoModelForMultimodalLM,
        AutoModelForPreTraining,
        AutoModelForSpeechSeq2Seq,
    )
    from transformers.utils import logging as their_logging

    config: Any = AutoConfig.from_pretrained(model_dir)
    config = getattr(config, "thinker_config", config)  # the speech output is not loaded
    kind: Any = AutoModelForMultimodalLM
    others = dict.fromkeys(_DUAL_ENCODERS, AutoModel) | dict.fromkeys(
        _RETRIEVERS, AutoModelForPreTraining
    )
    kind = others.get(config.model_type, kind)
    if config.is_encoder_decoder:
        kind, config.decoder_layers = AutoModelForSpeechSeq2Seq, 0
    else:
        text = config.get_text_config()
        # weights that are not loaded take no memory; ModernVBERT divides by the number of layers
        left = 1 if config.model_type == "colmodernvbert" else 0
        text.num_hidden_layers = left
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:left]
        for name in ("hidden_size_per_layer_input", "num_kv_shared_layers"):  # Gemma 4
            if getattr(text, name, None):
                setattr(text, name, 0)
    level = their_logging.get_verbosity()
    their_logging.set_verbosity_error()  # it would log each layer that is not loaded
    try:
        if dummy:
            model = kind.from_config(config).to(dtype)
        else:
            model = kind.from_pretrained(model_dir, config=config, dtype=dtype)
    finally:
        their_logging.set_verbosity(level)
    model.eval().requires_grad_(requires_grad=False)
    return model

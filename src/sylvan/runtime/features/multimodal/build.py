"""Builds both halves from the configuration."""

from __future__ import annotations

from pathlib import Path

import torch

from sylvan.config import Config
from sylvan.config.checkpoint import model_dir
from sylvan.config.media import MediaConfig
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.executor.capability import CapabilityWorker
from sylvan.runtime.executor.options import ModelContext
from sylvan.runtime.features.multimodal.control import Multimodal
from sylvan.runtime.features.multimodal.encoder import MediaEncoder
from sylvan.runtime.features.multimodal.encoder_service import NoEncoder
from sylvan.runtime.features.multimodal.llava_encoder import LlavaEncoder
from sylvan.runtime.features.multimodal.published.encoder import PublishedEncoder
from sylvan.runtime.features.multimodal.worker import MultimodalWorker
from sylvan.runtime.models.config import ModelConfig, ModelMedia
from sylvan.runtime.models.registry import load_config
from sylvan.runtime.platform.find import load_kinds


def media_worker(
    context: ModelContext, settings: MediaConfig | None = None
) -> CapabilityWorker | None:
    """Return the factory of the worker half for multimodal models; None: text-only model.

    Args:
        context: The model, as this worker half uses it.
        settings: Its settings; default: all defaults.

    Raises:
        ConfigError: The encoder cannot be loaded.
    """
    settings = settings or MediaConfig()
    if not _has_items(context.config.media) or not _has_vectors(settings):
        return None
    assert context.config.media is not None
    if context.config.media.decoder_prompt:
        from sylvan.runtime.features.multimodal.text_encoder import PromptEncoder

        dummy = context.load_format == "dummy"
        return MultimodalWorker(
            context, PromptEncoder(context.model_dir, context.dtype, dummy=dummy)
        )
    if settings.encoder_urls:
        return MultimodalWorker(context, NoEncoder())
    native = settings.encoder_backend == "auto" and context.device.type == "cpu"
    dummy = context.load_format == "dummy"
    encoder = _encoder(context.model_dir, context.dtype, context.device, dummy=dummy, native=native)
    return MultimodalWorker(context, encoder)


def media_control(settings: MediaConfig, model: ModelConfig) -> tuple[Multimodal, ...]:
    """Return the control half; empty for text-only models.

    Raises:
        ConfigError: The encoder is disabled, but the model cannot work without it.
    """
    media = model.media
    if media is not None and media.cross and not _has_vectors(settings):
        raise ConfigError(f"media.encoder_backend none: {media.architecture} needs its encoder")
    if media is not None and media.decoder_prompt and settings.encoder_urls:
        raise ConfigError(f"media.encoder_urls: {media.architecture} encodes texts itself")
    if media is None or not _has_items(media) or not _has_vectors(settings):
        return ()
    return (
        Multimodal(
            settings.vector_bytes,
            axes=bool(model.rope_axes),
            whole=media.whole,
            prefix=media.prefix,
            cross=media.cross,
            one=media.one,
        ),
    )


def encoder_of(config: Config) -> MediaEncoder:
    """Return the encoder of a model, without its language model.

    Args:
        config: Resolved.

    Raises:
        ConfigError: It has none, or it cannot be loaded.
    """
    folder = model_dir(config.model)
    model = load_config(folder, trusted=config.trust_remote_code)
    if model.media is None or not model.media.token_ids or model.media.decoder_prompt:
        raise ConfigError(f"media.encoder_only: {model.architecture} has no encoder of items")
    if config.media.encoder_backend == "none":
        raise ConfigError("media.encoder_only and media.encoder_backend none: nothing is left")
    on_cpu = config.device == "cpu"
    kind = "cpu" if on_cpu else load_kinds()[config.device].facts.device_type
    native = on_cpu and config.media.encoder_backend == "auto"
    dtype = getattr(torch, config.dtype)
    return _encoder(folder, dtype, torch.device(kind), dummy=False, native=native)


def _encoder(
    folder: Path, dtype: torch.dtype, device: torch.device, *, dummy: bool, native: bool
) -> MediaEncoder:
    if device.type == "cpu" and not dummy and LlavaEncoder.fits(folder):
        return LlavaEncoder(folder, dtype, native=native)
    if not dummy and PublishedEncoder.fits(folder):
        return PublishedEncoder(folder, dtype, device)
    from sylvan.runtime.features.multimodal.transformers_encoder import TransformersEncoder

    return TransformersEncoder(folder, dtype, dummy=dummy, native=native, device=device)


def _has_items(media: ModelMedia | None) -> bool:
    """Whether prompts have items: images, videos, audio, or a text that is encoded."""
    return media is not None and bool(media.token_ids or media.decoder_prompt)


def _has_vectors(settings: MediaConfig) -> bool:
    """Whether items are encoded, by this server or an encoder server."""
    return bool(settings.encoder_urls) or settings.encoder_backend != "none"

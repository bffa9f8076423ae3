"""Builds both halves from the configuration."""

from __future__ import annotations

from sylvan.config.tree import MediaConfig
from sylvan.runtime.executor.capability import CapabilityWorker
from sylvan.runtime.executor.options import ModelSite
from sylvan.runtime.features.multimodal.control import Multimodal
from sylvan.runtime.features.multimodal.worker import MultimodalWorker
from sylvan.runtime.models.config import ModelConfig


def media_worker(site: ModelSite) -> CapabilityWorker | None:
    """Return the factory of the worker half for multimodal models; None: text-only model.

    Raises:
        ConfigError: The encoder cannot be loaded.
    """
    if site.config.media is None:
        return None
    from sylvan.runtime.features.multimodal.transformers_encoder import TransformersEncoder

    dummy = site.load_format == "dummy"
    return MultimodalWorker(site, TransformersEncoder(site.model_dir, site.dtype, dummy=dummy))


def media_control(settings: MediaConfig, model: ModelConfig) -> tuple[Multimodal, ...]:
    """Return the control half; empty for text-only models."""
    if model.media is None:
        return ()
    media = model.media
    return (
        Multimodal(
            settings.vector_bytes,
            axes=bool(model.rope_axes),
            whole=media.whole,
            cross=media.cross,
        ),
    )

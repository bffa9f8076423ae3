"""Both halves from a configuration."""

from __future__ import annotations

from sylvan.config.tree import MediaConfig
from sylvan.runtime.executor.capability import CapabilityWorker
from sylvan.runtime.executor.options import ModelSite
from sylvan.runtime.features.multimodal.control import Multimodal
from sylvan.runtime.features.multimodal.worker import MultimodalWorker
from sylvan.runtime.models.config import ModelConfig


def media_worker(site: ModelSite) -> CapabilityWorker | None:
    """The worker half of models that take media; None: the model reads text only.

    Raises:
        ConfigError: the encoder cannot be loaded.
    """
    if site.config.media is None:
        return None
    from sylvan.runtime.features.multimodal.transformers_encoder import TransformersEncoder

    dummy = site.load_format == "dummy"
    return MultimodalWorker(site, TransformersEncoder(site.model_dir, site.dtype, dummy=dummy))


def media_control(settings: MediaConfig, model: ModelConfig) -> tuple[Multimodal, ...]:
    """The control half; none: the model reads text only."""
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

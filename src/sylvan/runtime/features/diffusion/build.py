"""Builds both halves from the configuration."""

from __future__ import annotations

import msgspec

from sylvan.config import Config
from sylvan.config.diffusion import DiffusionConfig
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.executor.capability import CapabilityWorker
from sylvan.runtime.executor.options import ModelContext
from sylvan.runtime.features.diffusion.control import Diffusion
from sylvan.runtime.features.diffusion.worker import DiffusionWorker, FillSchedule
from sylvan.runtime.models.config import BlockDiffusion, ModelConfig

_BLOCKS_AT_ONCE = 4  # blocks with logits in a forward pass; more blocks take turns


def block_shape(model: ModelConfig, settings: DiffusionConfig) -> BlockDiffusion | None:
    """Return the model's diffusion settings with the operator's changes; None: no diffusion model.

    Raises:
        ConfigError: Settings are given, but the model is not a diffusion model.
    """
    shape = model.diffusion
    if shape is None:
        if settings != DiffusionConfig():
            raise ConfigError(
                f"diffusion.*: {model.architecture} writes token by token; leave these settings out"
            )
        return None
    return msgspec.structs.replace(shape, block=settings.block or shape.block)


def diffusion_worker(
    context: ModelContext, settings: DiffusionConfig | None = None
) -> CapabilityWorker | None:
    """Return the worker half; None: no diffusion model.

    Raises:
        ConfigError: The device or the step settings do not support it.
    """
    settings = settings or DiffusionConfig()
    shape = block_shape(context.config, settings)
    if shape is None:
        return None
    if context.device.type != "cpu":
        raise ConfigError(f"{context.config.architecture} fills blocks by diffusion, on CPUs only")
    if context.max_tokens < 2 * shape.block and not shape.whole:
        raise ConfigError(
            f"scheduler.max_batch_tokens={context.max_tokens}: blocks of {shape.block} tokens need "
            f"steps of at least {2 * shape.block}"
        )
    steps = settings.steps or shape.block
    schedule = FillSchedule(steps, settings.confidence, shape.last_time)
    return DiffusionWorker(shape, schedule, settings.order)


def diffusion_control(
    config: Config, model: ModelConfig, context_len: int
) -> tuple[Diffusion, ...]:
    """Return the control half; empty: no diffusion model.

    Raises:
        ConfigError: Another setting excludes diffusion.
    """
    shape = block_shape(model, config.diffusion)
    if shape is None:
        return ()
    conflicts = {
        "speculative": config.speculative is not None,
        "disagg": config.disagg is not None,
        "pdmux": config.pdmux is not None,
        "tiers": config.tiers is not None,
        "lora": config.lora is not None,
        "parallel.tp": config.parallel.tp > 1,
    }
    for name, is_set in conflicts.items():
        if is_set:
            raise ConfigError(
                f"{name}: {model.architecture} fills blocks by diffusion, which cannot be combined "
                "with it"
            )
    whole = int(config.scheduler.max_batch_tokens) if shape.whole else None
    return (Diffusion(shape.block, shape.mask_id, context_len, whole),)


def max_rows(model: ModelConfig, settings: DiffusionConfig, running: int) -> int:
    """Return how many rows of a step get logits; 0: no diffusion model.

    Args:
        model: The model's config.
        settings: The operator's.
        running: Most requests that run at a time.
    """
    shape = block_shape(model, settings)
    if shape is None:
        return 0
    return max(running, shape.block if shape.whole else _BLOCKS_AT_ONCE * shape.block)

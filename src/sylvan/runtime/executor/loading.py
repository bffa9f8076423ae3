"""Builds models and reads their weights: all at once, or each matrix when it is packed."""

from __future__ import annotations

from typing import Any

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.executor.parts import ModelPlan, rounds_to_fp8, use_device_scans
from sylvan.runtime.models.checkpoint import defer_weights, load_weights
from sylvan.runtime.models.dummy import dummy_weights
from sylvan.runtime.models.fp8_inputs import round_to_fp8


def deferred_model(plan: ModelPlan) -> Any:
    """Build a native model whose matrices are read only when they are packed."""
    model = plan.model()
    if (kind := plan.options.load_format) == "dummy":
        dummy_weights(model, plan.options.seed, plan.formats.converted)
    else:
        defer_weights(
            model,
            plan.model_dir,
            plan.progress,
            plan.formats.converted,
            kind,
            blocks=plan.formats.blocks,
        )
    return model


def loaded_model(plan: ModelPlan) -> Any:
    """Build a model and read all of its weights.

    Raises:
        ConfigError: the weights cannot be read, or not by this load format.
    """
    formats, read = plan.formats, plan.options.load_format != "dummy"
    few_bits = read and (formats.loaded is not None or formats.blocks)
    deferred = few_bits and plan.platform is not None and plan.config.path == "native"
    model = plan.model(deferred=deferred)
    if plan.config.path == "transformers":
        _load_by_transformers(model, plan)
    elif (kind := plan.options.load_format) == "dummy":
        dummy_weights(model, plan.options.seed, plan.formats.converted)
    else:
        load_weights(model, plan.model_dir, plan.progress, formats, kind, device=plan.build.device)
    if rounds_to_fp8(plan):
        round_to_fp8(model)
    use_device_scans(plan, model)
    return model


def _load_by_transformers(model: Any, plan: ModelPlan) -> None:
    if plan.options.load_format == "dummy":
        raise ConfigError(
            "load_format=dummy is available for native families only; leave load_format at auto"
        )
    model.load(plan.model_dir, pickled=plan.options.load_format == "pt")

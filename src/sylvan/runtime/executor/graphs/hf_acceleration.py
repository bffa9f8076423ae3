"""Native kernels for models of the transformers library: matrix products and attention."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from sylvan.config.env import threads_are_calm
from sylvan.kernels.api import Unsupported
from sylvan.runtime.executor.graphs.linears import use_native_linears
from sylvan.runtime.executor.graphs.natives import NativeKernels, with_attention
from sylvan.runtime.executor.graphs.origins import Origins
from sylvan.runtime.executor.graphs.rotary import use_native_rotary
from sylvan.runtime.models.config import ModelConfig
from sylvan.runtime.models.fallback import TransformersModel
from sylvan.runtime.pool.mha import KVShape

logger = logging.getLogger(__name__)


def use_kernels(
    model: TransformersModel,
    dtype: torch.dtype,
    threads: int,
    pages: tuple[ModelConfig, KVShape] | None,
    origins: Origins | None = None,
) -> NativeKernels | None:
    """Replace the matrix products of `model`, and optionally its attention over native pages.

    Args:
        model: The model with its weights.
        dtype: Type of the rows.
        threads: Threads of the kernels.
        pages: Config and shape for native attention; None keeps PyTorch's attention.
        origins: Records which parameters are packed, and how.
    """
    if not threads_are_calm():
        logger.warning("set OMP_WAIT_POLICY=PASSIVE before Python starts for faster products")
        return None
    linears = use_native_linears(model.inner, dtype, threads, model.chosen, origins)
    if linears is None or pages is None:
        return linears
    try:
        native = with_attention(linears.library, dtype, *pages)
    except Unsupported as why:
        logger.warning("PyTorch computes attention: %s", why)
        return linears
    if not pages[0].states:
        use_native_rotary(model.inner, model.step, dtype)
    return replace(native, copies=linears.copies)

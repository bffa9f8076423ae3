"""The KV pool that fits a model and the way it is run."""

from __future__ import annotations

import torch

from sylvan.runtime.core.forward import KVCachePool
from sylvan.runtime.executor.graphs.pages import NativePool
from sylvan.runtime.layers.build import Build
from sylvan.runtime.models.config import ModelConfig
from sylvan.runtime.pool.latent import LatentPool
from sylvan.runtime.pool.mha import KVShape, MHAPool
from sylvan.runtime.pool.none import NoPool


def program_pool(
    config: ModelConfig, shape: KVShape, build: Build, dtype: torch.dtype
) -> NativePool | NoPool:
    """The pool of a step program; `dtype` is the model's or int8.

    Raises:
        Unsupported: no kernel reads such pages.
    """
    if not config.causal:
        return NoPool(shape.num_pages, shape.page_size)
    latent = config.latent.latent if config.latent else None
    return NativePool(shape, build.dtype, int8=dtype == torch.int8, latent=latent)


def tensor_pool(
    config: ModelConfig, shape: KVShape, build: Build, dtype: torch.dtype
) -> KVCachePool:
    """The pool of what a model's attention keeps of a token."""
    if not config.causal:
        return NoPool(shape.num_pages, shape.page_size)
    if config.latent is not None:
        return LatentPool(shape, config.latent.latent, dtype, build.device)
    return MHAPool(shape, dtype, build.device)

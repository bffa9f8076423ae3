"""Sizes and builds the KV pool of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch

from sylvan.config.plan import GroupBytes, PlannedLoad, fitting_tokens, group_tokens
from sylvan.kernels.paged.cache import SmallNumbers
from sylvan.kernels.paged.pages import NIBBLES, SCALED
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.cache.groups import KVGroup
from sylvan.runtime.core.forward import KVCachePool
from sylvan.runtime.core.memory import PageMemory
from sylvan.runtime.executor.graphs.pages import NativePool
from sylvan.runtime.executor.options import LocalOptions
from sylvan.runtime.executor.trees import pages_of_path
from sylvan.runtime.layers.build import Build
from sylvan.runtime.models.config import ModelConfig
from sylvan.runtime.models.groups import LayerGroup, kv_groups
from sylvan.runtime.platform.api import Platform
from sylvan.runtime.pool.latent import LatentPool
from sylvan.runtime.pool.mha import GroupShape, KVShape, MHAPool
from sylvan.runtime.pool.none import NoPool
from sylvan.runtime.pool.pages import JoinedPages, PagedBuffer
from sylvan.runtime.pool.transfers import DeviceTransfers

_SMALL: Mapping[torch.dtype, SmallNumbers] = MappingProxyType(
    {
        torch.int8: "int8",
        NIBBLES: "int4",
        torch.float8_e4m3fn: "fp8_e4m3",
        torch.float8_e5m2: "fp8_e5m2",
    }
)


def pages_shape(config: ModelConfig, shape: KVShape, options: LocalOptions) -> KVShape:
    """Return `shape` with the pages of each KV group.

    With `options.fill`, the pages of `shape` are the available memory, in pages of all layers; it
    is divided so that as many tokens as possible fit. Otherwise `shape` says how many tokens must
    fit, and layers with a sliding window take less memory for them.
    """
    groups = kv_groups(config)
    if len(groups) < 2:
        return shape
    size = shape.page_size
    load = PlannedLoad(
        running_reqs=options.max_running_reqs,
        step_tokens=options.max_batch_tokens,
        page_size=size,
    )
    num_tokens = (shape.num_pages - 1) * size
    if options.fill:
        num_tokens = _fitting(groups, shape, options.max_pages, load)
    pages = [1 + max(1, group_tokens(g.window, num_tokens, load) // size) for g in groups]
    made = zip(groups, pages, strict=True)
    shapes = (GroupShape(g.layers, count, g.columns) for g, count in made)
    return replace(shape, num_pages=pages[0], groups=tuple(shapes))


def with_paths(shape: KVShape, options: LocalOptions) -> KVShape:
    """Return `shape` with spare pages in each KV group for paths of draft trees."""
    more = options.tree_paths * pages_of_path(options.tree_depth, shape.page_size)
    if not more:
        return shape
    groups = tuple(replace(group, num_pages=group.num_pages + more) for group in shape.groups)
    return replace(shape, num_pages=shape.num_pages + more, groups=groups)


def _fitting(
    groups: Sequence[LayerGroup], shape: KVShape, max_pages: int | None, load: PlannedLoad
) -> int:
    """Number of tokens that fit into all pages, except one padding page per group."""
    sizes = [
        GroupBytes(len(group.layers) * (group.columns or shape.head_dim), group.window)
        for group in groups
    ]  # sizes in columns
    columns = sum(size.bytes_per_token for size in sizes)
    found = fitting_tokens(sizes, (shape.num_pages - 1) * shape.page_size * columns, load)
    return found if max_pages is None else min(found, (max_pages - 1) * shape.page_size)


def cache_groups(config: ModelConfig, shape: KVShape, num_states: int = 0) -> tuple[KVGroup, ...]:
    """KV groups of a model with the pages of `shape`, in the order of its page tables.

    Without attention layers, pages of one full group count tokens. `num_states`: slots of recurrent
    state, including the empty one.
    """
    groups = kv_groups(config) or (LayerGroup("full", ()),)
    found = [
        KVGroup(
            name=f"window-{group.window}" if group.window else group.kind,
            kind=group.kind,
            num_pages=pages.num_pages,
            page_size=shape.page_size,
            window=group.window or 0,
        )
        for group, pages in zip(groups, shape.kv_groups, strict=True)
    ]
    if num_states:
        found.append(KVGroup(name="state", kind="state", num_pages=num_states))
    return tuple(found)


def program_pool(
    config: ModelConfig, shape: KVShape, build: Build, dtype: torch.dtype
) -> NativePool | NoPool:
    """The pool of a step program; `dtype` is the model's, or one of `_SMALL`.

    Raises:
        Unsupported: no kernel reads such pages.
    """
    if not config.causal:
        return NoPool(shape.num_pages, shape.page_size)
    latent, index = None, 0
    if config.latent is not None:
        latent, index = config.latent.latent, config.latent.index
    small = _SMALL.get(dtype)
    rows = config.compressed is not None
    return NativePool(shape, build.dtype, small=small, latent=latent, index=index, rows=rows)


def tensor_pool(
    config: ModelConfig,
    shape: KVShape,
    build: Build,
    dtype: torch.dtype,
    platform: Platform | None = None,
) -> KVCachePool:
    """Build a pool of tensors; `platform` is that of the device, if any.

    Raises:
        ConfigError: latent attention has no such pages.
    """
    if not config.causal:
        return NoPool(shape.num_pages, shape.page_size)
    transfers = DeviceTransfers(platform) if platform is not None else None
    if config.latent is not None and dtype in SCALED:
        raise ConfigError(
            f"cache.dtype={_SMALL[dtype]}: this model keeps latents, which are not kept in it; "
            "leave it at model"
        )
    if config.compressed is not None and shape.page_size % config.compressed.block:
        raise ConfigError(
            f"cache.page_size={shape.page_size}: this model keeps entries of several tokens, for "
            f"which a page must hold a multiple of {config.compressed.block}"
        )
    if config.latent is not None:
        return LatentPool(shape, config.latent.latent, dtype, build.device, transfers)
    return MHAPool(shape, dtype, build.device, transfers)


def with_mirrored_pages(
    groups: Sequence[PageMemory], mirrored: Sequence[PagedBuffer]
) -> Sequence[PageMemory]:
    """KV groups for transfers: pages that capabilities keep move with the first group."""
    if not mirrored or not groups or not isinstance(groups[0], PagedBuffer):
        return groups
    return [JoinedPages([groups[0], *mirrored]), *groups[1:]]


def pool_bytes(pool: KVCachePool) -> int:
    """Bytes of all pages except padding pages."""
    return sum((group.num_pages - 1) * group.page_bytes for group in pool.groups)

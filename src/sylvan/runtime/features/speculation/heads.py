"""Builds the worker half of a draft head from its files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch

from sylvan.config.tree import DRAFTING_REQS
from sylvan.kernels.api import Unsupported
from sylvan.kernels.native.library import LibraryMissing
from sylvan.kernels.native.library import load as load_library
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.attention.native import NativeAttention
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.executor.graphs.head_program import DraftHeadModule, HeadProgram
from sylvan.runtime.executor.graphs.pages import NativePool
from sylvan.runtime.executor.options import ModelSite
from sylvan.runtime.features.speculation.head_tree import TreeGuesser
from sylvan.runtime.features.speculation.head_work import CHAIN, TreeShape
from sylvan.runtime.features.speculation.head_worker import MOST_PUT_OFF, HeadWorker, RunnableHead
from sylvan.runtime.layers.mesh import ONE_RANK
from sylvan.runtime.models.config import ModelConfig
from sylvan.runtime.models.draft_heads import HeadCheckpoint, make_head, model_tensor
from sylvan.runtime.models.files import LoadFormat
from sylvan.runtime.models.groups import kv_groups
from sylvan.runtime.models.next_heads import NextHead, with_next_layer
from sylvan.runtime.pool.mha import KVShape


@dataclass(frozen=True, kw_only=True, slots=True)
class _Loaded:
    """A head with its weights; see `RunnableHead`."""

    head: DraftHeadModule
    layer: ModelConfig  # its attention sizes
    columns: int
    index: int = 0  # spec of its attention layer
    read_layers: tuple[int, ...] = ()
    token_ids: torch.Tensor | None = None


def head_worker(
    path: Path | None, algorithm: str, depth: int, shape: TreeShape = CHAIN
) -> Callable[[ModelSite], HeadWorker]:
    """Return the factory of the worker half for a model.

    Args:
        path: The head's directory; None: the model's own.
        algorithm: Expected kind: `eagle`, `eagle3` or `nextn`.
        depth: Largest draft depth in one step.
        shape: Shape of draft trees.

    The factory raises ConfigError if the head is not for this model, is of another kind, or
    cannot run; the message says what is wrong.
    """

    def make(site: ModelSite) -> HeadWorker:
        whole = replace(site.build, mesh=ONE_RANK)  # the first rank holds the whole head
        site = replace(site, build=whole)
        longer = replace(site, build=replace(whole, length=whole.length + depth))
        loaded = _eagle(path, algorithm, longer) if path else _next(longer)
        try:
            return _runnable(loaded, depth, shape, site)
        except (Unsupported, LibraryMissing) as why:
            raise ConfigError(
                f"speculative.algorithm={algorithm}: the draft head cannot run: {why}"
            ) from None

    return make


def _eagle(path: Path, algorithm: str, site: ModelSite) -> _Loaded:
    checkpoint = HeadCheckpoint(path, site.config)
    config = checkpoint.config
    if config.kind != algorithm:
        raise ConfigError(
            f"speculative.algorithm={algorithm}: {path} holds a head for {config.kind}; use "
            f"{config.kind}, or name another head"
        )
    window = kv_groups(site.config)[0].window  # older pages no longer belong to the request
    layer = msgspec.structs.replace(config.layer, layer_windows=(window,))
    head = make_head(msgspec.structs.replace(config, layer=layer), site.build)
    form = _load_format(site)
    checkpoint.load(head, lambda name: model_tensor(name, site.model_dir, site.config, form))
    return _Loaded(
        head=head,
        layer=layer,
        columns=config.columns,
        read_layers=config.read_layers,
        token_ids=checkpoint.token_ids(),
    )


def _next(site: ModelSite) -> _Loaded:
    config = site.config
    head = NextHead(config, site.build)
    head.load(site.model_dir, _load_format(site))
    index = with_next_layer(config).kv_index(config.num_hidden_layers)
    return _Loaded(head=head, layer=config, columns=config.hidden_size, index=index)


def _load_format(site: ModelSite) -> LoadFormat:
    return "auto" if site.load_format == "dummy" else site.load_format


def _runnable(loaded: _Loaded, depth: int, shape: TreeShape, site: ModelSite) -> HeadWorker:
    spare, tail = -(-depth // site.kv_shape.page_size), 1 + -(-depth // site.kv_shape.page_size)
    most = min(DRAFTING_REQS, site.limits.max_reqs)
    paths = 2 * most * shape.width if shape.width > 1 else 0
    batch = _batch(site, loaded.layer, spare, paths * tail, paths)
    first_spare = site.kv_shape.kv_groups[0].num_pages
    trees = None
    if paths:
        first = first_spare + spare * site.limits.max_reqs
        trees = TreeGuesser(batch, first, tail, shape, most)
    program = HeadProgram(
        loaded.head, loaded.columns, batch, load_library(), site.build.dtype, loaded.index
    )
    runnable = RunnableHead(
        program=program,
        batch=batch,
        spare=spare,
        first_spare=first_spare,
        trees=trees,
        read_layers=loaded.read_layers,
        token_ids=loaded.token_ids,
        vocab_size=site.vocab_size,
    )
    return HeadWorker(runnable, site.draw)


def _batch(site: ModelSite, layer: ModelConfig, spare: int, more: int, paths: int) -> ForwardBatch:
    """Allocate buffers and pages: those of the model's first KV group, and spare ones."""
    latent = layer.latent
    shape = KVShape(
        num_layers=1,
        num_kv_heads=layer.num_key_value_heads,
        head_dim=latent.latent + latent.rope_dim if latent else layer.head_dim,
        num_pages=site.kv_shape.kv_groups[0].num_pages + spare * site.limits.max_reqs + more,
        page_size=site.kv_shape.page_size,
    )
    limits = replace(
        site.limits,
        max_tokens=site.limits.max_tokens + MOST_PUT_OFF,
        max_samples=site.limits.max_reqs + paths,
        max_paths=paths,
        max_pages_per_req=site.limits.max_pages_per_req + spare,
    )
    pool = NativePool(shape, site.build.dtype, latent=latent.latent if latent else None)
    return ForwardBatch(limits, pool, NativeAttention())

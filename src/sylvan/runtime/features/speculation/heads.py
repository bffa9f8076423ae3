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
from sylvan.runtime.executor.options import ModelContext
from sylvan.runtime.features.speculation.head_tree import TreeDrafter
from sylvan.runtime.features.speculation.head_work import CHAIN, TreeShape
from sylvan.runtime.features.speculation.head_worker import MAX_PUT_OFF, HeadWorker, RunnableHead
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
) -> Callable[[ModelContext], HeadWorker]:
    """Return the factory of the worker half for a model.

    Args:
        path: The head's directory; None: the model's own.
        algorithm: Expected kind: `eagle`, `eagle3` or `nextn`.
        depth: Largest draft depth in one step.
        shape: Shape of draft trees.

    The factory raises ConfigError if the head is not for this model, is of another kind, or
    cannot run; the message says what is wrong.
    """

    def make(context: ModelContext) -> HeadWorker:
        whole = replace(context.build, mesh=ONE_RANK)  # the first rank holds the whole head
        context = replace(context, build=whole)
        longer = replace(context, build=replace(whole, length=whole.length + depth))
        loaded = _eagle(path, algorithm, longer) if path else _next(longer)
        try:
            return _runnable(loaded, depth, shape, context)
        except (Unsupported, LibraryMissing) as why:
            raise ConfigError(
                f"speculative.algorithm={algorithm}: the draft head cannot run: {why}"
            ) from None

    return make


def _eagle(path: Path, algorithm: str, context: ModelContext) -> _Loaded:
    checkpoint = HeadCheckpoint(path, context.config)
    config = checkpoint.config
    if config.kind != algorithm:
        raise ConfigError(
            f"speculative.algorithm={algorithm}: {path} holds a head for {config.kind}; use "
            f"{config.kind}, or name another head"
        )
    window = kv_groups(context.config)[0].window  # older pages no longer belong to the request
    layer = msgspec.structs.replace(config.layer, layer_windows=(window,))
    head = make_head(msgspec.structs.replace(config, layer=layer), context.build)
    form = _load_format(context)
    checkpoint.load(head, lambda name: model_tensor(name, context.model_dir, context.config, form))
    return _Loaded(
        head=head,
        layer=layer,
        columns=config.columns,
        read_layers=config.read_layers,
        token_ids=checkpoint.token_ids(),
    )


def _next(context: ModelContext) -> _Loaded:
    config = context.config
    head = NextHead(config, context.build)
    head.load(context.model_dir, _load_format(context))
    index = with_next_layer(config).kv_index(config.num_hidden_layers)
    return _Loaded(head=head, layer=config, columns=config.hidden_size, index=index)


def _load_format(context: ModelContext) -> LoadFormat:
    return "auto" if context.load_format == "dummy" else context.load_format


def _runnable(loaded: _Loaded, depth: int, shape: TreeShape, context: ModelContext) -> HeadWorker:
    spare, tail = (
        -(-depth // context.kv_shape.page_size),
        1 + -(-depth // context.kv_shape.page_size),
    )
    limit = min(DRAFTING_REQS, context.limits.max_reqs)
    paths = 2 * limit * shape.width if shape.width > 1 else 0
    batch = _batch(context, loaded.layer, spare, paths * tail, paths)
    first_spare = context.kv_shape.kv_groups[0].num_pages
    trees = None
    if paths:
        first = first_spare + spare * context.limits.max_reqs
        trees = TreeDrafter(batch, first, tail, shape, limit)
    program = HeadProgram(
        loaded.head, loaded.columns, batch, load_library(), context.build.dtype, loaded.index
    )
    runnable = RunnableHead(
        program=program,
        batch=batch,
        spare=spare,
        first_spare=first_spare,
        trees=trees,
        read_layers=loaded.read_layers,
        token_ids=loaded.token_ids,
        vocab_size=context.vocab_size,
    )
    return HeadWorker(runnable, context.draw)


def _batch(
    context: ModelContext, layer: ModelConfig, spare: int, more: int, paths: int
) -> ForwardBatch:
    """Allocate buffers and pages: those of the model's first KV group, and spare ones."""
    latent = layer.latent
    shape = KVShape(
        num_layers=1,
        num_kv_heads=layer.num_key_value_heads,
        head_dim=latent.latent + latent.rope_dim if latent else layer.head_dim,
        num_pages=context.kv_shape.kv_groups[0].num_pages + spare * context.limits.max_reqs + more,
        page_size=context.kv_shape.page_size,
    )
    limits = replace(
        context.limits,
        max_tokens=context.limits.max_tokens + MAX_PUT_OFF,
        max_samples=context.limits.max_reqs + paths,
        max_paths=paths,
        max_pages_per_req=context.limits.max_pages_per_req + spare,
    )
    pool = NativePool(shape, context.build.dtype, latent=latent.latent if latent else None)
    return ForwardBatch(limits, pool, NativeAttention())

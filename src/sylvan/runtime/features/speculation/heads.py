"""From the files of a draft head to the worker half that runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from sylvan.kernels.api import Unsupported
from sylvan.kernels.native.library import LibraryMissing
from sylvan.kernels.native.library import load as load_library
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.attention.native import NativeAttention
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.executor.graphs.head_program import HeadProgram
from sylvan.runtime.executor.graphs.pages import NativePool
from sylvan.runtime.executor.options import ModelSite
from sylvan.runtime.features.speculation.head_worker import MOST_PUT_OFF, HeadWorker, RunnableHead
from sylvan.runtime.models.draft_heads import (
    DraftHeadConfig,
    HeadCheckpoint,
    make_head,
    model_tensor,
)
from sylvan.runtime.models.groups import kv_groups
from sylvan.runtime.pool.mha import KVShape


def head_worker(path: Path, algorithm: str, depth: int) -> Callable[[ModelSite], HeadWorker]:
    """Makes the worker half for a model.

    Args:
        path: The head's directory.
        algorithm: What it should be, `eagle` or `eagle3`.
        depth: Most guesses for a request in one step.

    What it returns raises ConfigError if the head is none for this model, or of another kind, or
    cannot be run; names what is wrong.
    """

    def make(site: ModelSite) -> HeadWorker:
        try:
            return _make(path, algorithm, depth, site)
        except (Unsupported, LibraryMissing) as why:
            raise ConfigError(
                f"speculative.draft_model={path}: the head cannot be run: {why}"
            ) from None

    return make


def _make(path: Path, algorithm: str, depth: int, site: ModelSite) -> HeadWorker:
    library = load_library()
    checkpoint = HeadCheckpoint(path, site.config)
    config = checkpoint.config
    if config.kind != algorithm:
        raise ConfigError(
            f"speculative.algorithm={algorithm}: {path} holds a head for {config.kind}; say "
            f"{config.kind}, or name another head"
        )
    window = kv_groups(site.config)[0].window  # older pages are not the request's any more
    config = msgspec.structs.replace(
        config, layer=msgspec.structs.replace(config.layer, layer_windows=(window,))
    )
    head = make_head(config, replace(site.build, length=site.build.length + depth))
    load_format = "auto" if site.load_format == "dummy" else site.load_format
    checkpoint.load(head, lambda name: model_tensor(name, site.model_dir, site.config, load_format))
    spare = -(-depth // site.kv_shape.page_size)
    batch = _batch(site, config, spare)
    runnable = RunnableHead(
        program=HeadProgram(head, config.columns, batch, library, site.build.dtype),
        batch=batch,
        spare=spare,
        read_layers=config.read_layers,
        token_ids=checkpoint.token_ids(),
        vocab_size=site.vocab_size,
    )
    return HeadWorker(runnable, site.draw)


def _batch(site: ModelSite, config: DraftHeadConfig, spare: int) -> ForwardBatch:
    """Buffers and pages: those of the model's first KV group, and some for guesses."""
    pages = site.kv_shape.kv_groups[0].num_pages + spare * site.limits.max_reqs
    shape = KVShape(
        num_layers=1,
        num_kv_heads=config.layer.num_key_value_heads,
        head_dim=config.layer.head_dim,
        num_pages=pages,
        page_size=site.kv_shape.page_size,
    )
    limits = replace(
        site.limits,
        max_tokens=site.limits.max_tokens + MOST_PUT_OFF,
        max_samples=0,
        max_pages_per_req=site.limits.max_pages_per_req + spare,
    )
    return ForwardBatch(limits, NativePool(shape, site.build.dtype), NativeAttention())

"""Starts from the step program that an earlier start saved, without importing PyTorch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from sylvan.config import Config
from sylvan.config.load import dump
from sylvan.kernels.native.library import Library, LibraryMissing
from sylvan.kernels.native.library import load as load_library
from sylvan.runtime.engine.compose import compose_scheduler, effective_config, grammar_of, number
from sylvan.runtime.engine.engine_core import Emit, EngineCore
from sylvan.runtime.executor.api import Executor
from sylvan.runtime.executor.early.allowed import may_start_early
from sylvan.runtime.executor.early.executor import EarlyExecutor
from sylvan.runtime.executor.early.file import SavedProgram, read_program
from sylvan.runtime.executor.early.key import load_cache_files, program_name
from sylvan.runtime.executor.early.steps import SavedSteps
from sylvan.runtime.features.early.control import WholeExecutor
from sylvan.runtime.features.kv_events.publisher import KVEventPublisher

logger = logging.getLogger(__name__)


def early_start(config: Config, emit: Emit) -> EngineCore | None:
    """Build everything that serves the model from the files of an earlier start.

    Args:
        config: Resolved.
        emit: Receives the outputs of each step.

    Returns: None if there are no such files, or the configuration needs more than a program.
    """
    if not may_start_early(config):
        return None
    try:
        library = load_library()
    except LibraryMissing:
        return None
    files = load_cache_files(config)
    saved = read_program(files, program_name(config, library.variant)) if files else None
    if saved is None:
        return None
    try:
        return _build(config, emit, library, saved)
    except IndexError:
        logger.warning("load_cache: compiling again: the program does not fit its weights")
        return None


def _build(config: Config, emit: Emit, library: Library, saved: SavedProgram) -> EngineCore:
    model = saved.model
    config = effective_config(config, str(model.facts["runner"]), exact=model.exact)
    size = number(config.cache.page_size)
    num_pages = -(-number(config.cache.max_tokens) // size) + 1
    grammar = grammar_of(config, model.vocab_size)
    steps = SavedSteps(library, saved, num_pages, number(config.threads))

    def whole() -> Executor:
        from sylvan.runtime.engine.build import build_late  # loads torch

        return build_late(config, grammar, steps.memory)

    overlap = config.scheduler.overlap == "on"
    executor = EarlyExecutor(model.with_pages(num_pages), steps, whole, overlap=overlap)
    publisher = KVEventPublisher(config.kv_events) if config.kv_events else None
    capabilities = grammar.control, WholeExecutor(executor)
    scheduler, inspect = compose_scheduler(
        config, executor, emit, lambda cache: capabilities, publisher
    )

    def state() -> Mapping[str, Any]:
        return {"config": dump(config), "grammar": asdict(grammar.stats())}

    def close() -> None:
        executor.close()
        if publisher is not None:
            publisher.close()
        grammar.close()

    return EngineCore(
        scheduler,
        facts={
            **model.facts,
            "max_total_tokens": scheduler.load().max_total_num_tokens,
            "kv_bytes": (num_pages - 1) * model.page_bytes,
            "weight_version": config.weight_version,
        },
        state=state,
        inspect=inspect,
        executor=executor,
        close=close,
        grammar_counts=grammar.counts,
        weight_version=config.weight_version,
    )

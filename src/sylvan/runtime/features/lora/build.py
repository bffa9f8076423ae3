"""Builds the worker half from the configuration."""

from __future__ import annotations

from collections.abc import Callable

from sylvan.config.tree import LoraConfig
from sylvan.runtime.executor.options import ModelContext
from sylvan.runtime.features.lora.worker import LoraCapacity, LoraWorker


def lora_worker(settings: LoraConfig) -> Callable[[ModelContext], LoraWorker]:
    """Return the factory of the worker half; `settings` are resolved."""
    memory, max_rank = settings.memory, settings.max_rank
    assert isinstance(memory, int), "a resolved configuration has no auto"
    assert isinstance(max_rank, int), "a resolved configuration has no auto"
    capacity = LoraCapacity(slots=settings.max_per_batch, max_rank=max_rank, max_bytes=memory)
    return lambda context: LoraWorker(context, capacity)

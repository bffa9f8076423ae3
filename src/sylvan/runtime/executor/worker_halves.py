"""Builds the worker halves of capabilities, before the executor that contains them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import nn

from sylvan.kernels.api import Unsupported
from sylvan.protocol.arrays import IntArray
from sylvan.runtime.cache.groups import KVGroup
from sylvan.runtime.core.forward import BatchLimits, ForwardBatch
from sylvan.runtime.core.memory import PageMemory
from sylvan.runtime.executor.capability import CapabilityWorker
from sylvan.runtime.executor.graphs.program import ProgramRunner
from sylvan.runtime.executor.graphs.split import SplitPrompt
from sylvan.runtime.executor.options import ExecutorParts, ModelContext
from sylvan.runtime.executor.parts import ModelPlan
from sylvan.runtime.executor.pools import pages_shape
from sylvan.runtime.executor.runner import ModelRunner
from sylvan.runtime.sampling.api import TokenSampler
from sylvan.runtime.sampling.params import SamplingBatch, SamplingSlots


class DeferredParts:
    """References to objects that are built after the worker halves that use them."""

    def __init__(self) -> None:
        self.runner: ModelRunner | None = None
        self.sampler: TokenSampler | None = None
        self.params: SamplingSlots | None = None
        self.batch: ForwardBatch | None = None
        self.groups: Sequence[KVGroup] = ()
        self.pages: Sequence[PageMemory] = ()

    def built(self, batch: ForwardBatch, runner: ModelRunner) -> None:
        """Set the batch of all steps, and the runner of the model."""
        self.batch, self.runner = batch, runner

    def head(self, vectors_RD: torch.Tensor) -> torch.Tensor:
        assert self.runner is not None
        return self.runner.head(vectors_RD)

    def position_shifts(self) -> IntArray:
        """Position shift of each request of the step. Shape: (B,)."""
        assert self.batch is not None
        return self.batch.host.position_shifts

    def constant(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.runner.constant(tensor) if self.runner is not None else tensor

    def memory(self) -> tuple[Sequence[KVGroup], Sequence[PageMemory]]:
        return self.groups, self.pages

    def split(self, limits: BatchLimits, page_size: int) -> SplitPrompt:
        if not isinstance(self.runner, ProgramRunner):
            raise Unsupported("there is no step program")
        return self.runner.split(limits, page_size)

    def draw(
        self,
        logits_RW: torch.Tensor,
        slots: IntArray,
        positions: IntArray,
        ids: torch.Tensor | None = None,
    ) -> IntArray:
        assert self.sampler is not None
        params = self.params
        assert params is not None
        plain = params.greedy[slots] & ~params.has_penalty[slots] & ~params.has_bias[slots]
        if plain.all():
            best = logits_RW.argmax(-1)
            return (best if ids is None else ids[best]).numpy().astype(np.int32)
        if ids is not None:  # all other ids are forbidden
            few_RW = logits_RW
            logits_RW = torch.full((len(few_RW), params.vocab_size), -torch.inf)
            logits_RW.index_copy_(1, ids, few_RW)
        batch = SamplingBatch(slots, positions.astype(np.int64), params)
        return self.sampler.sample(logits_RW, batch).token_ids


def worker_halves(
    plan: ModelPlan, parts: ExecutorParts, deferred: DeferredParts
) -> tuple[CapabilityWorker, ...]:
    """Build the worker halves of capabilities that this model needs."""
    context = ModelContext(
        vocab_size=plan.config.vocab_size,
        pooling=plan.pooling,
        labels=plan.config.num_labels > 0,
        has_states=bool(plan.config.states),
        head=deferred.head,
        memory=deferred.memory,
        split=lambda: deferred.split(plan.limits, plan.options.page_size),
        draw=deferred.draw,
        model_dir=plan.model_dir,
        config=plan.config,
        build=plan.build,
        limits=plan.limits,
        kv_shape=pages_shape(plan.paged_config, plan.kv_shape, plan.options),
        load_format=plan.options.load_format,
        skeleton=None if plan.config.path == "transformers" else partial(plan.skeleton, whole=True),
        dtype=plan.build.dtype,
        device=plan.build.device,
        max_tokens=plan.limits.max_tokens,
        constant=deferred.constant,
        position_shifts=deferred.position_shifts,
    )
    made = (make(context) for make in parts.workers)
    return tuple(worker for worker in made if worker is not None)


def adapter_of(workers: tuple[CapabilityWorker, ...]) -> Callable[[nn.Module], None]:
    """Combine the workers' `adapt` hooks."""

    def adapt(model: nn.Module) -> None:
        for worker in workers:
            worker.adapt(model)

    return adapt

"""Saves the program of a model, for starts without PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sylvan.kernels.blob import BlobError, blob_digest
from sylvan.runtime.executor.api import ExecutorCaps
from sylvan.runtime.executor.early.file import SavedModel, save_program
from sylvan.runtime.executor.facts import SaveProgram
from sylvan.runtime.executor.graphs.pages import NativePool
from sylvan.runtime.executor.graphs.program import ProgramRunner
from sylvan.runtime.executor.parts import BuiltModel, ModelPlan


def saver(plan: ModelPlan, made: BuiltModel, caps: ExecutorCaps) -> SaveProgram | None:
    """How to save a program; None: steps of this model need more, or nothing is cached."""
    runner, pool, kept = made.runner, made.pool, made.kept
    if not isinstance(runner, ProgramRunner) or not isinstance(pool, NativePool) or kept is None:
        return None
    tensors = plan.hidden_layers or plan.edits_inputs or plan.loads or plan.pooling
    others = plan.config.states or plan.config.media or runner.host_calls
    if tensors or others or len(pool.groups) > 1 or plan.limits.max_paths or not caps.kv_groups:
        return None
    [group] = pool.groups

    def save(path: Path, facts: Mapping[str, str | int | float | bool | None]) -> None:
        try:
            digest = blob_digest(kept.path)
        except (OSError, BlobError):
            return  # the weights could not be kept, which has been logged
        model = SavedModel(
            facts=dict(facts),
            exact=made.exact,
            caps=caps,
            limits=plan.limits,
            page_bytes=group.page_bytes,
            vocab_size=plan.config.vocab_size,
            weights=kept.path.name,
            weights_digest=digest,
        )
        save_program(path, model, runner.image(group.memory[0].numpy(), kept.numbers))

    return save

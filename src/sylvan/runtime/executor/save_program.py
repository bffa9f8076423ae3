"""Saves the program of a model, for starts without PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sylvan.kernels.blob import BlobError, blob_digest
from sylvan.runtime.executor.api import ExecutorCaps
from sylvan.runtime.executor.background_writes import BackgroundWrites
from sylvan.runtime.executor.early.file import SavedModel, save_program
from sylvan.runtime.executor.facts import SaveProgram
from sylvan.runtime.executor.graphs.pages import NativePool
from sylvan.runtime.executor.graphs.program import ProgramRunner
from sylvan.runtime.executor.parts import BuiltModel, ModelPlan


def saver(
    plan: ModelPlan, made: BuiltModel, caps: ExecutorCaps, writes: BackgroundWrites
) -> SaveProgram | None:
    """Return a function that saves a step program, after the packed weights have been written.

    Returns: None if steps of this model need more than a program, or there is no load cache.
    """
    runner, pool, kept = made.runner, made.pool, made.kept
    if not isinstance(runner, ProgramRunner) or not isinstance(pool, NativePool) or kept is None:
        return None
    tensors = plan.hidden_layers or plan.edits_inputs or plan.loads or plan.pooling
    others = plan.config.states or plan.config.media or runner.host_calls
    if tensors or others or len(pool.groups) > 1 or plan.limits.max_paths or not caps.kv_groups:
        return None
    [group] = pool.groups

    def save(name: str, facts: Mapping[str, str | int | float | bool | None]) -> None:
        image = runner.image(group.memory[0].numpy(), kept.numbers)
        known = dict(facts)

        def write(_: Callable[[], bool]) -> None:
            try:
                digest = blob_digest(kept.path)
            except (OSError, BlobError):
                return  # writing the weights failed, which has been logged
            model = SavedModel(
                facts=known,
                exact=made.exact,
                caps=caps,
                limits=plan.limits,
                page_bytes=group.page_bytes,
                vocab_size=plan.config.vocab_size,
                weights=kept.name,
                weights_digest=digest,
            )
            if not kept.failed:
                save_program(kept.files, name, model, image)

        writes.add(write)

    return save

"""Runs plans on a saved program."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from sylvan.kernels.memory import Bytes
from sylvan.kernels.native.binding import StepRun
from sylvan.kernels.native.library import Library
from sylvan.kernels.native.part import NativePart
from sylvan.protocol.errors import ExecutorError
from sylvan.runtime.core.host import HostArrays
from sylvan.runtime.core.memory import Region
from sylvan.runtime.core.step import StepPlan, StepResult
from sylvan.runtime.executor.early.file import SavedProgram
from sylvan.runtime.executor.early.memory import InheritedMemory
from sylvan.runtime.executor.failures import FAILURES, failure
from sylvan.runtime.executor.graphs.native_step import NativeStep, StepBuffers
from sylvan.runtime.executor.results import step_result
from sylvan.runtime.executor.slots import RequestSlots
from sylvan.runtime.pool.prefault import PagePrefaulter


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """Implements `Pending`."""

    result: StepResult | None
    error: ExecutorError | None = None

    def done(self) -> bool:
        return True

    def wait(self) -> StepResult:
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result


class HostPages:
    """Implements `PageRegions` over one region of host memory."""

    def __init__(self, memory: Bytes) -> None:
        self._address = memory.ctypes.data
        self.num_pages, self.page_bytes = memory.shape

    def regions(self, page: int) -> tuple[Region, ...]:
        size = self.page_bytes
        return (Region(self._address + page * size, size, size),)


class SavedSteps:
    """Implements `PlanWorker` for plans that need only the program: see `early.needs`.

    Args:
        library: The kernels that the program was compiled for.
        saved: The program.
        num_pages: Pages of the KV cache.
        threads: Threads of the kernels.

    Attributes:
        memory: Memory that the next executor continues with.

    Raises:
        IndexError: The program does not fit its weights.
    """

    def __init__(self, library: Library, saved: SavedProgram, num_pages: int, threads: int) -> None:
        model, image = saved.model, saved.image
        pages, limits = saved.pages(num_pages), model.limits
        library.dll.sylvan_threads(threads)
        self.memory = InheritedMemory(
            pages=pages,
            host=HostArrays(limits),
            slots=RequestSlots(limits.max_reqs, model.vocab_size),
            file=saved.weights_file,
            weights=saved.weights,
        )
        self._buffers = image.memory(saved.weights.arrays, pages)
        self._part = NativePart(library, image.records, self._buffers)
        self._program_run = library.dll.sylvan_program_run
        entry, stride = image.logits
        [group] = model.caps.kv_groups
        self._step = NativeStep(
            self._run,
            StepBuffers(self.memory.host, limits, group.page_size),
            (self._buffers[entry].ctypes.data, stride),
            self.memory.slots.newest,
            self.memory.slots.params,
        )
        self._prefaulter = PagePrefaulter([HostPages(pages)])
        self._prefaulter.start()

    def launch(self, plan: StepPlan) -> FinishedStep:
        """Compute a step; a failure is part of the result."""
        self._prefaulter.begin(plan.pages)
        try:
            return FinishedStep(self._result(plan))
        except FAILURES as error:
            return FinishedStep(None, failure(error))
        finally:
            self._prefaulter.end()

    def close(self) -> None:
        """End the threads; the memory may belong to another executor by now. Idempotent."""
        self._prefaulter.close()

    def _run(self, step: StepRun) -> int:
        return self._program_run(self._part.handle, ctypes.byref(step))

    def _result(self, plan: StepPlan) -> StepResult:
        memory = self.memory
        slots = memory.slots
        if plan.leaves or plan.joins:
            slots.apply(plan)
        if plan.pages.size:
            groups, rows, entries, pages = plan.pages
            memory.host.page_tables[groups, rows, entries] = pages
        for copy in plan.copies:  # copies whole pages, because their tokens are interleaved
            memory.pages[copy.target] = memory.pages[copy.source]
        if not plan.num_slices:
            return StepResult()
        drawn = self._step.run(plan, draw=True)
        assert drawn is not None
        if slots.params.counts:
            slots.params.sampled(plan.sample_slots, drawn.token_ids)
        errors: dict[int, str] = {}
        if slots.errors:
            of = plan.slots
            for index in set(plan.samples.tolist()):
                if why := slots.errors.get(int(of[index])):
                    errors[index] = why
        return step_result(plan, drawn, {}, errors)

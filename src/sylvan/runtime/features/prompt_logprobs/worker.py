"""Worker half: log probabilities of prompt rows, computed in blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from sylvan.protocol.messages import TokenLogprobs
from sylvan.protocol.requests import GenerateRequest, LogprobOptions
from sylvan.runtime.core.step import Join
from sylvan.runtime.executor.capability import CapabilityWorker, Report, StepContext
from sylvan.runtime.features.prompt_logprobs.control import PromptLogprobsCapability, PromptRows


class PromptLogprobsWorker(CapabilityWorker):
    """Stores the options of each slot; computes when the plan asks for rows."""

    name: ClassVar = PromptLogprobsCapability.name
    reads_rows: ClassVar = True

    def __init__(self) -> None:
        self._options: dict[int, LogprobOptions] = {}

    def join(self, join: Join) -> None:
        request = join.request
        if isinstance(request, GenerateRequest) and request.logprobs is not None:
            self._options[join.slot] = request.logprobs

    def leave(self, slot: int) -> None:
        self._options.pop(slot, None)

    def after_forward(self, step: StepContext, work: Sequence[PromptRows]) -> Report:
        readers = {}
        slots = step.plan.slots
        for part in work:
            if (options := self._options.get(int(slots[part.index]))) is None:
                continue
            with step.guard(part.index, "prompt log probabilities failed"):
                readers[part.index] = step.token_logprobs(part.rows, part.token_ids, options)

        def report() -> dict[int, TokenLogprobs]:
            return {index: read() for index, read in readers.items()}

        return report

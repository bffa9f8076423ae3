"""Worker half: copies states before the forward pass and tells the layers which slots to use.

A state cannot go back to where a guess was wrong. So it is kept after each row of a chain of
guesses, and once it is known which of them were right, theirs becomes the state of the request.
"""

from __future__ import annotations

from typing import ClassVar

from msgspec.structs import replace

from sylvan.runtime.core.states import StateWork
from sylvan.runtime.core.step import SliceOutput, StepPlan, StepResult
from sylvan.runtime.executor.capability import CapabilityWorker, Report, StepContext
from sylvan.runtime.features.recurrent.control import RecurrentStates


class RecurrentStatesWorker(CapabilityWorker):
    """Runs where the model has a pool of states (`ForwardBatch.states`)."""

    name: ClassVar = RecurrentStates.name

    def __init__(self) -> None:
        self._accepted: dict[int, int] = {}  # guesses of slices of the newest step

    def before_forward(self, step: StepContext, work: StateWork) -> None:
        """See `CapabilityWorker.before_forward`."""
        batch = step.batch
        assert batch.states is not None
        saves = _branches(step.plan, batch.states.num_slots)
        batch.state_work = replace(work, saves=(*work.saves, *saves)) if saves else work
        for source, target in work.copies:
            batch.states.copy(source, target)

    def after_forward(self, step: StepContext, work: StateWork) -> Report | None:
        """See `CapabilityWorker.after_forward`."""
        return (lambda: self._accepted) if step.plan.drafts else None

    def after_result(self, step: StepContext, work: StateWork, result: StepResult) -> None:
        """See `CapabilityWorker.after_result`."""
        states = step.batch.states
        assert states is not None
        self._accepted, branch = {}, states.num_slots
        for draft in step.plan.drafts:
            count = len(draft.parents)
            right = (result.others.get(draft.index) or SliceOutput()).num_accepted
            if right < count:
                states.copy(branch + right, int(work.slots[draft.index]))
            self._accepted[draft.index] = right
            branch += count


def _branches(plan: StepPlan, first: int) -> list[tuple[int, int, int]]:
    """Where the states before each guess of a step are kept; see `StateWork.saves`."""
    saves: list[tuple[int, int, int]] = []
    lens = (plan.stops - plan.starts).tolist()
    for draft in plan.drafts:
        count = len(draft.parents)
        known = lens[draft.index] - count
        saves += [(draft.index, known + at, first + len(saves) + at) for at in range(count)]
    return saves

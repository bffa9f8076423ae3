"""Worker half: copies states before the forward pass and tells the layers which slots to use."""

from __future__ import annotations

from typing import ClassVar

from sylvan.runtime.core.states import StateWork
from sylvan.runtime.executor.capability import CapabilityWorker, StepContext
from sylvan.runtime.features.recurrent.control import RecurrentStates


class RecurrentStatesWorker(CapabilityWorker):
    """Runs where the model has a pool of states (`ForwardBatch.states`)."""

    name: ClassVar = RecurrentStates.name

    def before_forward(self, step: StepContext, work: StateWork) -> None:
        """See `CapabilityWorker.before_forward`."""
        batch = step.batch
        batch.state_work = work
        assert batch.states is not None
        for source, target in work.copies:
            batch.states.copy(source, target)

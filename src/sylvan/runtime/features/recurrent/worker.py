"""Worker half: copies states before the forward pass, and sets the slots that layers use.

A state cannot be rolled back to before a rejected draft. So it is saved after each row of a
draft path, and after verification the state after the last accepted one becomes the request's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from sylvan.runtime.core.states import StateWork
from sylvan.runtime.core.step import SliceOutput, StepPlan, StepResult
from sylvan.runtime.executor.capability import CapabilityWorker, Report, StepContext
from sylvan.runtime.executor.trees import leaf_paths
from sylvan.runtime.executor.verify import path_of
from sylvan.runtime.features.recurrent.control import RecurrentStates


class RecurrentStatesWorker(CapabilityWorker):
    """Runs if the model has a pool of states (`ForwardBatch.states`)."""

    name: ClassVar = RecurrentStates.name
    in_layers: ClassVar = True

    def __init__(self) -> None:
        self._accepted: dict[int, int] = {}  # drafts of slices of the newest step
        self._places: dict[tuple[int, int], int] = {}  # slot of the state after (slice, draft)

    def before_forward(self, step: StepContext, work: StateWork) -> None:
        batch = step.batch
        assert batch.states is not None
        if step.plan.drafts:
            first = batch.states.num_slots
            branches = iter(range(first, first + batch.states.num_branches))
            work = self._with_branches(step.plan, work, branches)
        batch.state_work = work
        for source, target in work.copies:
            batch.states.copy(source, target)

    def after_forward(self, step: StepContext, work: StateWork) -> Report | None:
        return (lambda: self._accepted) if step.plan.drafts else None

    def after_result(self, step: StepContext, work: StateWork, result: StepResult) -> None:
        states, plan = step.batch.states, step.plan
        assert states is not None
        self._accepted, ends = {}, plan.ends.tolist() if plan.drafts else []
        for draft in plan.drafts:
            output = result.others.get(draft.index) or SliceOutput()
            end = ends[draft.index]
            drafted = plan.input_ids[end - len(draft.parents) : end].tolist()
            right = output.token_ids[: output.num_accepted]
            path = path_of(draft.parents, drafted, right)
            place = self._places[draft.index, path[-1] if path else -1]
            if place != (own := int(work.slots[draft.index])):
                states.copy(place, own)
            self._accepted[draft.index] = len(path)

    def _with_branches(self, plan: StepPlan, work: StateWork, branches: Iterator[int]) -> StateWork:
        """Return the batch with each draft path as a sequence, and states saved after every row."""
        drafts = {draft.index: draft for draft in plan.drafts}
        slots, lens = work.slots.tolist(), (plan.stops - plan.starts).tolist()
        texts: list[int] = []  # slot of each
        text_of: list[int] = []  # first of each slice
        copies, saves = list(work.copies), list[tuple[int, int, int]]()
        self._places = {}
        for index, slot in enumerate(slots):
            text_of.append(len(texts))
            draft = drafts.get(index)
            if draft is None:
                texts.append(slot)
                continue
            parents = draft.parents
            paths = [list(range(len(parents)))] if draft.is_chain else leaf_paths(parents)
            known = lens[index] - len(parents)
            for number, path in enumerate(paths):
                own = next(branches) if number else slot
                copies += [(slot, own)] if number else []
                for row, node in enumerate([-1, *path[:-1]], known):
                    if (index, node) not in self._places:
                        self._places[index, node] = place = next(branches)
                        saves.append((len(texts), row, place))
                self._places[index, path[-1]] = own
                texts.append(own)
        saves += [(text_of[index], row, slot) for index, row, slot in work.saves]
        return StateWork(np.array(texts, np.int32), tuple(copies), tuple(saves))

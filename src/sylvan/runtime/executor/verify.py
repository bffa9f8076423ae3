"""Which guesses of a step are right: those that equal what plain decoding samples in their place.

Random numbers are keyed by (seed, sample, position), so that each row of a slice with guesses draws
exactly the token that it would draw without them, greedy or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from sylvan.protocol.arrays import IntArray
from sylvan.runtime.core.step import DraftRows, SliceOutput, StepPlan, StepResult
from sylvan.runtime.sampling.api import SampleOutput
from sylvan.runtime.sampling.logprobs import join


def accepted_path(
    parents: Sequence[int], guesses: Sequence[int], sampled: Sequence[int]
) -> list[int]:
    """Guesses that are right, from the root on.

    Args:
        parents: As in `DraftRows.parents`.
        guesses: Their ids.
        sampled: The token drawn after the last known token, then after each guess.

    Returns: their indices, in order of depth.
    """
    path: list[int] = []
    last = -1
    while True:
        wanted = sampled[last + 1]
        children = (i for i, p in enumerate(parents) if p == last and guesses[i] == wanted)
        found = next(children, None)
        if found is None:
            return path
        path.append(found)
        last = found


def accepted_guesses(plan: StepPlan, draft: DraftRows, token_ids: IntArray) -> list[int]:
    """`accepted_path` of one slice, from all that the step sampled (S,)."""
    end, count = int(plan.ends[draft.index]), len(draft.parents)
    first = int(np.argmax(plan.samples == draft.index))
    guesses = plan.input_ids[end - count : end].tolist()
    return accepted_path(draft.parents, guesses, token_ids[first : first + count + 1].tolist())


def verified(plan: StepPlan, drawn: SampleOutput, errors: Mapping[int, str]) -> StepResult:
    """What a step with guesses brought: the accepted ones, and the token sampled after them."""
    drafts = {draft.index: draft for draft in plan.drafts}
    outputs = [SliceOutput() for _ in range(plan.num_slices)]
    samples = plan.samples.tolist()
    for index in dict.fromkeys(samples):
        first = samples.index(index)
        path = []
        if index in drafts:
            path = accepted_guesses(plan, drafts[index], drawn.token_ids)
        rows = [first, *(first + 1 + guess for guess in path)]
        why = next((drawn.errors[row] for row in rows if row in drawn.errors), "")
        tokens = tuple(int(drawn.token_ids[row]) for row in rows)
        logprobs = [part for row in rows if (part := drawn.logprobs.get(row)) is not None]
        outputs[index] = SliceOutput(
            () if why else tokens, join(logprobs) if logprobs else None, error=why
        )
    for index, why in errors.items():
        outputs[index] = SliceOutput(error=why)
    return StepResult.of(outputs)

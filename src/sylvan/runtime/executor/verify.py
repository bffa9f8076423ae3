"""Which guesses of a step are right: those that equal what plain decoding samples in their place.

Random numbers are keyed by (seed, sample, position), so that each row of a slice with guesses draws
exactly the token that it would draw without them, greedy or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sylvan.protocol.arrays import IntArray
from sylvan.runtime.core.step import SliceOutput, StepPlan, StepResult
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


def accepted_guesses(plan: StepPlan, token_ids: IntArray) -> dict[int, list[int]]:
    """`accepted_path` by index of the slices with guesses, from all that the step sampled (S,)."""
    ends, ids, drawn = plan.ends.tolist(), plan.input_ids, token_ids.tolist()
    samples = plan.samples.tolist()
    found: dict[int, list[int]] = {}
    for draft in plan.drafts:
        end, count = ends[draft.index], len(draft.parents)
        first = samples.index(draft.index)
        guesses = ids[end - count : end].tolist()
        found[draft.index] = accepted_path(draft.parents, guesses, drawn[first : first + count + 1])
    return found


def verified(plan: StepPlan, drawn: SampleOutput, errors: Mapping[int, str]) -> StepResult:
    """What a step with guesses brought: the accepted ones, and the token sampled after them."""
    paths, ids = accepted_guesses(plan, drawn.token_ids), drawn.token_ids.tolist()
    outputs = [SliceOutput() for _ in range(plan.num_slices)]
    last = -1
    for first, index in enumerate(plan.samples.tolist()):
        if index == last:
            continue
        last = index
        rows = [first, *(first + 1 + guess for guess in paths.get(index, ()))]
        why = next((drawn.errors[row] for row in rows if row in drawn.errors), "")
        logprobs = [part for row in rows if (part := drawn.logprobs.get(row)) is not None]
        outputs[index] = SliceOutput(
            () if why else tuple([ids[row] for row in rows]),
            logprobs=join(logprobs) if logprobs else None,
            error=why,
        )
    for index, why in errors.items():
        outputs[index] = SliceOutput(error=why)
    return StepResult.of(outputs)

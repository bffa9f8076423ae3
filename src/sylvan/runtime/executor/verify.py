"""Verifies draft tokens: one is accepted if plain decoding samples it at its position.

Random numbers are keyed by (seed, sample, position), so each row of a slice with draft tokens draws
exactly the token that it would draw without them, greedy or not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec
import numpy as np

from sylvan.protocol.arrays import IntArray
from sylvan.protocol.logprobs import join
from sylvan.runtime.core.step import SliceOutput, StepPlan, StepResult
from sylvan.runtime.sampling.output import SampleOutput


def accepted_path(
    parents: Sequence[int], drafted: Sequence[int], sampled: Sequence[int]
) -> list[int]:
    """Return the accepted draft tokens, starting at the root.

    Args:
        parents: See `DraftRows.parents`.
        drafted: Token ids of the draft tokens.
        sampled: The token sampled after the last known token, then after each draft token.

    """
    path: list[int] = []
    last = -1
    while True:
        wanted = sampled[last + 1]
        children = (i for i, p in enumerate(parents) if p == last and drafted[i] == wanted)
        found = next(children, None)
        if found is None:
            return path
        path.append(found)
        last = found


def path_of(parents: Sequence[int], drafted: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """The path of draft tokens that matches these tokens, starting at the root.

    Args:
        parents: See `DraftRows.parents`.
        drafted: Token ids of the draft tokens.
        tokens: The accepted tokens.
    """
    path: list[int] = []
    last = -1
    for token in tokens:
        last = next(i for i, p in enumerate(parents) if p == last and drafted[i] == token)
        path.append(last)
    return path


def accepted_drafts(plan: StepPlan, token_ids: IntArray) -> dict[int, list[int]]:
    """The accepted draft tokens by slice index, from sampled ids (S,)."""
    return _accepted(plan, token_ids.tolist(), plan.samples.tolist())


def _accepted(plan: StepPlan, drawn: Sequence[int], samples: Sequence[int]) -> dict[int, list[int]]:
    assert plan.sample_rows is not None
    fed = plan.input_ids[plan.sample_rows].tolist()  # input id of each sampled row
    found: dict[int, list[int]] = {}
    for draft in plan.drafts:
        first, count = samples.index(draft.index), len(draft.parents)
        drafted, sampled = fed[first + 1 : first + 1 + count], drawn[first : first + 1 + count]
        if draft.is_chain:
            right = next((i for i, g in enumerate(drafted) if g != sampled[i]), count)
            found[draft.index] = list(range(right))
        else:
            found[draft.index] = accepted_path(draft.parents, drafted, sampled)
    return found


def without_drafts(plan: StepPlan, slices: Collection[int]) -> StepPlan:
    """The same step without the draft tokens of these slices.

    Their rows are still computed, but their results are ignored.
    """
    assert plan.sample_rows is not None
    samples = plan.samples
    kept = np.ones(len(samples), bool)
    for index in slices:
        kept[np.flatnonzero(samples == index)[1:]] = False
    first = 3 * plan.num_slices
    parts = plan.numbers[:first], samples[kept], plan.numbers[first + len(samples) :]
    return msgspec.structs.replace(
        plan,
        num_samples=int(kept.sum()),
        numbers=np.concatenate(parts),
        sample_rows=plan.sample_rows[kept],
        drafts=tuple(draft for draft in plan.drafts if draft.index not in slices),
    )


def verified(plan: StepPlan, drawn: SampleOutput, errors: Mapping[int, str]) -> StepResult:
    """Result of a step with draft tokens: the accepted ones, and the token sampled after them."""
    ids, samples = drawn.token_ids.tolist(), plan.samples.tolist()
    paths = _accepted(plan, ids, samples)
    tokens = [-1] * plan.num_slices
    others: dict[int, SliceOutput] = {}
    plain = not drawn.logprobs and not drawn.errors
    last = -1
    for first, index in enumerate(samples):
        if index == last:
            continue
        last = index
        path = paths.get(index)
        if plain and not path:
            tokens[index] = ids[first]
            continue
        rows = [first, *(first + 1 + node for node in path or ())]
        others[index] = _output(rows, ids, drawn)
    for index, token in enumerate(tokens):
        if token < 0 and index not in others:
            others[index] = SliceOutput()
    for index, why in errors.items():
        others[index] = SliceOutput(error=why)
    return StepResult(tokens, others)


def _output(rows: Sequence[int], ids: Sequence[int], drawn: SampleOutput) -> SliceOutput:
    """Output of the accepted rows of a slice."""
    why = next((drawn.errors[row] for row in rows if row in drawn.errors), "")
    if why:
        return SliceOutput(error=why)
    logprobs = [part for row in rows if (part := drawn.logprobs.get(row)) is not None]
    tokens = tuple([ids[row] for row in rows])
    return SliceOutput(tokens, logprobs=join(logprobs) if logprobs else None)

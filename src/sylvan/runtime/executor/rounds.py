"""Samples a step with draft tokens position by position.

Penalties count the tokens before a row, and a grammar depends on them: the allowed tokens of a row
are known only after the previous draft token is verified. One forward pass computes all logits;
each round samples one row per slice, updates constraints and counts, and continues with slices
whose draft token was right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from sylvan.protocol.logprobs import join
from sylvan.protocol.messages import TokenLogprobs
from sylvan.runtime.core.step import SliceOutput, StepPlan
from sylvan.runtime.executor.backend import StepBackend
from sylvan.runtime.executor.results import CONSTRAINED_STATUS
from sylvan.runtime.executor.slots import RequestSlots
from sylvan.runtime.sampling.constraints import Constraints, RowOutcome
from sylvan.runtime.sampling.output import SampleOutput
from sylvan.runtime.sampling.params import SamplingBatch

NO_OUTCOMES: Mapping[int, RowOutcome] = {}


@dataclass(slots=True)
class _Chain:
    """Progress of one slice.

    Attributes:
        first: Its first sampled row.
        parents, drafted: Its draft tokens, as in `DraftRows`.
        path: Accepted draft tokens.
        row: Row to sample next; None: done.
    """

    first: int
    parents: Sequence[int]
    drafted: Sequence[int]
    row: int | None
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    path: list[int] = field(default_factory=list[int])
    ended: bool = False
    error: str = ""
    status: int = 500

    def take(self, outcome: RowOutcome, logprobs: TokenLogprobs | None, error: str) -> None:
        """Add the outcome of the sampled row.

        An error after accepted tokens is dropped, because the next step raises it again unless the
        output ends.
        """
        self.row = None
        if error:
            if not self.tokens:
                self.error = error
                self.status = CONSTRAINED_STATUS if outcome.error else 500
            return
        self.tokens += outcome.tokens
        self.ended = outcome.ended
        if logprobs is not None:
            self.logprobs.append(logprobs)
        if outcome.tokens and not outcome.ended and all(map(self._follow, outcome.tokens)):
            self.row = self.first + 1 + self.path[-1]

    def _follow(self, token: int) -> bool:
        """Whether `token` is a draft token that follows the accepted draft tokens."""
        last = self.path[-1] if self.path else -1
        children = (i for i, parent in enumerate(self.parents) if parent == last)
        found = next((i for i in children if self.drafted[i] == token), None)
        if found is not None:
            self.path.append(found)
        return found is not None

    def output(self) -> SliceOutput:
        return SliceOutput(
            tuple(self.tokens),
            logprobs=join(self.logprobs) if self.logprobs else None,
            error=self.error,
            ended=self.ended,
            status=self.status,
            accepted=len(self.path),
        )


@dataclass(frozen=True, slots=True)
class Verified:
    """Result of a step with draft tokens: outputs by slice, and the sampled ids by row."""

    outputs: Sequence[SliceOutput]
    drawn: SampleOutput


def verify_in_rounds(
    plan: StepPlan, backend: StepBackend, slots: RequestSlots, constraints: Constraints | None
) -> Verified:
    """Sample the rows of a finished forward pass as far as draft tokens are right."""
    rows, params = slots.rows(plan), slots.params
    chains = _chains(plan)
    ids = np.zeros(plan.num_samples, np.int32)
    while todo := [chain for chain in chains.values() if chain.row is not None]:
        at = np.array([chain.row for chain in todo], np.int32)
        batch = SamplingBatch(rows.slots[at], rows.positions[at], params)
        masks, outcomes = None, NO_OUTCOMES
        if constraints is not None and constraints.prepare(batch.slots, batch.positions):
            masks = constraints.masks(batch)
        drawn = backend.draw_rows(at, batch, masks)
        ids[at] = drawn.token_ids
        if constraints is not None:
            outcomes = constraints.advance(batch, drawn.token_ids)
        _count(batch, drawn, outcomes)
        for i, (chain, token) in enumerate(zip(todo, drawn.token_ids.tolist(), strict=True)):
            outcome = outcomes.get(i) or RowOutcome((token,))
            own = outcome.tokens[:1] == (token,)  # otherwise a constraint replaced the token
            error = outcome.error or (drawn.errors.get(i, "") if own else "")
            chain.take(outcome, drawn.logprobs.get(i), error)
    newest = {
        int(plan.slots[index]): chain.tokens[0]
        for index, chain in chains.items()
        if chain.tokens and not chain.drafted
    }
    backend.keep({index: chain.path for index, chain in chains.items()}, newest)
    silent = SliceOutput()
    outputs = [
        chains[index].output() if index in chains else silent for index in range(plan.num_slices)
    ]
    return Verified(outputs, SampleOutput(ids, {}, {}))


def _chains(plan: StepPlan) -> dict[int, _Chain]:
    """Chains of the slices that sample, by slice."""
    drafts = {draft.index: draft.parents for draft in plan.drafts}
    ends, ids = plan.ends.tolist(), plan.input_ids
    found: dict[int, _Chain] = {}
    for row, index in enumerate(plan.samples.tolist()):
        if index not in found:
            parents = drafts.get(index, ())
            drafted = ids[ends[index] - len(parents) : ends[index]].tolist()
            found[index] = _Chain(row, parents, drafted, row)
    return found


def _count(batch: SamplingBatch, drawn: SampleOutput, outcomes: Mapping[int, RowOutcome]) -> None:
    params = batch.params
    if not params.counts:
        return
    tokens: list[tuple[int, ...]] = [(token,) for token in drawn.token_ids.tolist()]
    for row, outcome in outcomes.items():
        tokens[row] = outcome.tokens
    each = np.repeat(batch.slots, [len(some) for some in tokens])
    params.sampled(each, np.fromiter((t for some in tokens for t in some), np.int32, len(each)))

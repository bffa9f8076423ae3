"""Converts sampled rows to slice outputs; shared by all backends.

Shapes: R slices of the step, S sampled rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sylvan.runtime.core.step import SliceOutput, StepPlan, StepResult
from sylvan.runtime.executor.verify import verified
from sylvan.runtime.sampling.constraints import RowOutcome
from sylvan.runtime.sampling.output import NO_VALID_TOKEN, SampleOutput

CONSTRAINED_STATUS = 400  # status of errors that the request's own constraints caused


def step_result(
    plan: StepPlan,
    drawn: SampleOutput,
    outcomes: Mapping[int, RowOutcome],
    errors: Mapping[int, str],
) -> StepResult:
    """Build the result of a step.

    Args:
        plan: The step's plan.
        drawn: Its sampled rows.
        outcomes: Outcomes of constrained rows.
        errors: Slice index -> the error of its request.
    """
    if plan.drafts:
        return verified(plan, drawn, errors)
    ids = drawn.token_ids.tolist()
    others: dict[int, SliceOutput] = {}
    if plan.num_samples == plan.num_slices:
        tokens = ids
    else:
        tokens = [-1] * plan.num_slices
        for index, token in zip(plan.samples.tolist(), ids, strict=True):
            tokens[index] = token
        others = {index: SliceOutput() for index, token in enumerate(tokens) if token < 0}
    if drawn.logprobs or drawn.errors or outcomes:
        samples = plan.samples.tolist()
        for row in {*drawn.logprobs, *drawn.errors, *outcomes}:
            others[samples[row]] = _output(row, ids[row], drawn, outcomes.get(row))
    for index, why in errors.items():
        others[index] = SliceOutput(error=why)
    return StepResult(tokens, others)


def failing(outputs: Sequence[SliceOutput], errors: Mapping[int, str]) -> StepResult:
    """Build a result in which failed requests have an error instead of an output."""
    failed = {index: SliceOutput(error=why) for index, why in errors.items()}
    return StepResult.of([failed.get(i) or output for i, output in enumerate(outputs)])


def _output(row: int, token: int, drawn: SampleOutput, outcome: RowOutcome | None) -> SliceOutput:
    outcome = outcome or RowOutcome((token,))
    if outcome.error:
        return SliceOutput(error=outcome.error, status=CONSTRAINED_STATUS)
    if not outcome.tokens:
        return SliceOutput(ended=outcome.ended)
    if outcome.tokens[0] == token and (why := drawn.errors.get(row)):
        return SliceOutput(error=why)
    return SliceOutput(outcome.tokens, logprobs=drawn.logprobs.get(row), ended=outcome.ended)


def no_valid_token(token_ids: list[int]) -> dict[int, str]:
    """Errors for rows with a negative id, which means that no token is valid."""
    return {row: NO_VALID_TOKEN for row, token in enumerate(token_ids) if token < 0}

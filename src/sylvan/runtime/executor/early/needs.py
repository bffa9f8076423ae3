"""Requests that a saved program cannot serve without PyTorch."""

from __future__ import annotations

from sylvan.protocol.requests import EmbedRequest, GenerateRequest
from sylvan.runtime.core.step import StepPlan


def needs_torch(request: GenerateRequest | EmbedRequest) -> bool:
    """Whether the steps of a request need more than a saved program.

    Grammars and thinking budgets constrain samples, and log probabilities of prompts read rows that
    are not sampled. Both need worker halves of capabilities, which only the full executor has.
    """
    if isinstance(request, EmbedRequest):
        return True
    budget = request.thinking is not None and request.thinking.budget is not None
    prompt = request.logprobs is not None and request.logprobs.start is not None
    constrained = request.sampling.grammar is not None or budget
    elsewhere = request.lora is not None or request.bootstrap is not None
    return constrained or prompt or elsewhere or bool(request.media)


def exceeds_program(plan: StepPlan) -> bool:
    """Whether a step needs more than a saved program."""
    if plan.work or plan.embeds or plan.drafts or plan.positions is not None:
        return True
    return any(needs_torch(join.request) for join in plan.joins)

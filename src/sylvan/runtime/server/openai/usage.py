"""Counts the usage of an answer as it arrives."""

from __future__ import annotations

from typing import Any

from sylvan.api.openai.common import GenerationBody, StreamOptions, usage_reply
from sylvan.protocol.messages import Usage
from sylvan.runtime.server.context import Context
from sylvan.runtime.server.endpoint import Call
from sylvan.runtime.tokenizer.types import SampleDelta


class UsageCounter:
    """Token counts of all samples of one call."""

    def __init__(self, call: Call[Any], num_prompts: int, n: int) -> None:
        self._context: Context = call.context
        self._n = n
        self._usages = [Usage()] * (num_prompts * n)
        self._reasoning = [0] * (num_prompts * n)

    def update(self, prompt: int, delta: SampleDelta) -> None:
        """Replace the counts of a sample by those in its newest delta."""
        self._usages[prompt * self._n + delta.index] = delta.usage

    def set_reasoning(self, index: int, tokens: int) -> None:
        """Set the number of reasoning tokens of a sample."""
        self._reasoning[index] = tokens

    def reply(self) -> dict[str, Any]:
        """Return `usage` so far."""
        return usage_reply(
            self._usages,
            self._n,
            cached=self._context.settings.text.cache_report,
            reasoning_tokens=sum(self._reasoning),
        )


def stream_usage(context: Context, options: StreamOptions | None) -> tuple[bool, bool]:
    """Return whether a stream ends with usage, and whether every chunk has it."""
    at_end = context.settings.text.stream_include_usage
    if options is None:
        return at_end, False
    return at_end or bool(options.include_usage), bool(options.continuous_usage_stats)


def model_name(context: Context, body: GenerationBody) -> str:
    """Return the model name for an answer: as the client spelled it."""
    return body.model or context.settings.served_model_name

"""The workload of a load test: conversations of one or more turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BenchTurn:
    """One request.

    Attributes:
        text: The prompt, or the continuation of a conversation.
        prompt_tokens: Tokens of `text`.
        output_tokens: Tokens to generate.
        token_ids: Exact prompt, for APIs that accept IDs.
        messages: Whole prompt of a chat, instead of `text` as the user's message.
        extra: Additional fields of the request.
    """

    text: str
    prompt_tokens: int
    output_tokens: int
    token_ids: Sequence[int] = ()
    messages: Sequence[Mapping[str, object]] = ()
    extra: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True)
class BenchConversation:
    """Sequential turns.

    Attributes:
        turns: At least one.
        at_s: Start time in seconds after the first one; None if the data set has no times.
    """

    turns: Sequence[BenchTurn]
    at_s: float | None = None

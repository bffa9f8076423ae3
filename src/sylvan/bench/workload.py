"""What a load test asks: conversations of one or more turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BenchTurn:
    """One request.

    Attributes:
        text: The prompt, or what a conversation goes on with.
        prompt_tokens: Tokens of `text`.
        output_tokens: Tokens to generate.
        token_ids: The prompt exactly, for APIs that take ids.
        messages: The whole prompt of a chat, instead of `text` as the user's message.
        extra: Further fields of the request.
    """

    text: str
    prompt_tokens: int
    output_tokens: int
    token_ids: Sequence[int] = ()
    messages: Sequence[Mapping[str, object]] = ()
    extra: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True)
class BenchConversation:
    """Turns that follow each other.

    Attributes:
        turns: At least one.
        at_s: When it begins, in seconds from the first one; None if the data set has no times.
    """

    turns: Sequence[BenchTurn]
    at_s: float | None = None

"""Bodies of `/v1/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from sylvan.api.native import TokenIds
from sylvan.api.openai.common import GenerationBody, UsageReply
from sylvan.protocol.errors import RequestError

DEFAULT_MAX_TOKENS = 16


class CompletionBody(GenerationBody):
    """One or several prompts to continue."""

    prompt: str | TokenIds | list[str] | list[TokenIds]
    """The prompt: text or token IDs; or a list of prompts."""
    max_tokens: int | None = None
    """Most tokens of the answer; default: 16."""
    best_of: Annotated[int, Field(ge=1)] | None = None
    """Generate this many samples, and return the `n` most likely ones."""
    echo: bool | None = None
    """Return the prompt before the answer."""
    logprobs: Annotated[int, Field(ge=0)] | None = None
    """Return log probabilities, with this many alternatives per position."""
    suffix: str | None = None
    """Text after the answer, for fill-in-the-middle models."""
    return_token_ids: bool | None = None
    """Return the token IDs of the answer."""
    return_prompt_token_ids: bool | None = None
    """Return the token IDs of the prompt."""


def prompts_of(body: CompletionBody) -> list[str | tuple[int, ...]]:
    """Return the prompts of a body.

    Raises:
        RequestError: A prompt is empty.
    """
    prompt: Any = body.prompt
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        prompt = [prompt]
    if not prompt:
        raise RequestError("prompt must not be empty.", param="prompt")
    for i, item in enumerate(prompt):
        if not item:
            path = "prompt" if len(prompt) == 1 else f"prompt[{i}]"
            raise RequestError(f"{path} must not be empty.", param=path)
    return [item if isinstance(item, str) else tuple(item) for item in prompt]


class CompletionChoice(BaseModel):
    """One choice."""

    index: int
    text: str
    logprobs: dict[str, Any] | None = None
    finish_reason: Literal["stop", "length", "content_filter", "abort"] | None
    matched_stop: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionReply(BaseModel):
    """All choices."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageReply
    metadata: dict[str, Any]
    sglext: dict[str, Any] | None = None

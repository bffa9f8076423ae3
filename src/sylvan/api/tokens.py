"""Bodies of `/tokenize` and `/detokenize`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any

from pydantic import BaseModel, Field

from sylvan.api.native import TokenIds
from sylvan.api.openai.chat import ChatTool
from sylvan.api.request_fields import Name
from sylvan.api.validation import WireModel

MAX_TEXTS = 1024

Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_TEXTS)]


class TokenizeBody(WireModel):
    """Text, texts, or a conversation to tokenise."""

    model: Name | None = None
    prompt: str | Texts | None = None
    """A text, or a list of texts."""
    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=65536)] | None = None
    """A conversation in OpenAI's format; instead of `prompt`."""
    tools: Annotated[list[ChatTool], Field(max_length=1024)] | None = None
    tool_choice: Any = None
    reasoning_effort: str | float | None = None
    continue_final_message: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = True
    add_generation_prompt: bool | None = None

    @property
    def without_effect(self) -> Collection[str]:
        if self.messages is not None:
            return ("model", "add_special_tokens", *(() if self.tools else ("tool_choice",)))
        of_chats = ("tools", "tool_choice", "reasoning_effort", "chat_template_kwargs")
        return ("model", *of_chats, "continue_final_message", "add_generation_prompt")


class TokenizeReply(BaseModel):
    """Token IDs of one text, or of several."""

    tokens: list[int] | list[list[int]]
    count: int | list[int]
    max_model_len: int


class DetokenizeBody(WireModel):
    """Token IDs to decode."""

    model: Name | None = None
    tokens: TokenIds | Annotated[list[TokenIds], Field(max_length=MAX_TEXTS)]
    """Token IDs of one text, or of several."""
    skip_special_tokens: bool | None = True

    @property
    def without_effect(self) -> Collection[str]:
        return ("model",)


class DetokenizeReply(BaseModel):
    """One text, or several."""

    text: str | list[str]

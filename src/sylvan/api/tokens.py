"""Wire models of `/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field

from sylvan.api.native import Name, TokenIds
from sylvan.api.openai.chat import ChatTool
from sylvan.api.validation import WireModel

MAX_TEXTS = 1024

Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_TEXTS)]


class TokenizeBody(WireModel):
    """Text, texts, or a conversation, to be tokenised."""

    model: Name | None = None
    prompt: str | Texts | None = None
    """A text, or a list of texts."""
    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=65536)] | None = None
    """A conversation in the OpenAI shape; instead of `prompt`."""
    tools: Annotated[list[ChatTool], Field(max_length=1024)] | None = None
    tool_choice: Any = None
    reasoning_effort: Any = None
    continue_final_message: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = True
    add_generation_prompt: bool | None = None


class TokenizeReply(BaseModel):
    """Ids of one text, or of several."""

    tokens: list[int] | list[list[int]]
    count: int | list[int]
    max_model_len: int


class DetokenizeBody(WireModel):
    """Token ids to be turned into text."""

    model: Name | None = None
    tokens: TokenIds | Annotated[list[TokenIds], Field(max_length=MAX_TEXTS)]
    """The ids of one text, or of several."""
    skip_special_tokens: bool | None = True


class DetokenizeReply(BaseModel):
    """One text, or several."""

    text: str | list[str]

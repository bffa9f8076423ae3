"""Bodies of `/parse_function_call` and `/separate_reasoning`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field

from sylvan.api.openai.chat import ChatTool
from sylvan.api.request_fields import Name
from sylvan.api.validation import WireModel


class ParseCallsBody(WireModel):
    """Text that contains tool calls."""

    text: str
    tools: Annotated[list[ChatTool], Field(max_length=1024)]
    tool_call_parser: Name | None = None
    """Name of the parser; default: the model's own."""


class ParseCallsReply(BaseModel):
    """Text and calls."""

    normal_text: str
    calls: list[dict[str, Any]]


class SeparateBody(WireModel):
    """Text that contains reasoning."""

    text: str
    reasoning_parser: Name | None = None
    """Name of the parser; default: the model's own."""
    return_blocks: bool | None = False


class SeparateReply(BaseModel):
    """Reasoning and answer."""

    reasoning_text: str
    text: str

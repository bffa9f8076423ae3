"""Bodies of `/v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from sylvan.api.media import media_kind, openai_media
from sylvan.api.native import ThinkingBudget, TokenIds
from sylvan.api.openai.common import GenerationBody, UsageReply
from sylvan.api.validation import OpenModel, WireModel
from sylvan.protocol.errors import RequestError

MAX_MESSAGES = 65536
MAX_TOOLS = 1024
MAX_TOOL_NAME = 256

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_SHORT = {"role", "content"}
_DROPPED_PARTS = ("thinking", "reasoning", "redacted_thinking")


class ContentPart(WireModel):
    """A content part of a message: text, or an image, video or audio for multimodal models."""

    type: str
    text: str | None = None

    @property
    def passes_on(self) -> bool:
        """Media parts keep all their fields."""
        return media_kind(self.type) is not None


class CalledFunction(OpenModel):
    """The function of a tool call."""

    name: str
    arguments: str | dict[str, Any] | None = None


class MessageToolCall(OpenModel):
    """A tool call in an assistant message."""

    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None
    function: CalledFunction


class ChatMessage(OpenModel):
    """One message of a conversation; templates may read further fields."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[str | ContentPart] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    function_call: CalledFunction | None = None
    """Older form of `tool_calls`."""
    reasoning_content: str | None = None
    prefix: bool | None = None
    """Continue this message, the last one, as `continue_final_message` does."""


class FunctionTool(OpenModel):
    """A function that the model may call; templates may read further fields."""

    name: Annotated[str, Field(min_length=1, max_length=MAX_TOOL_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(OpenModel):
    """A tool; templates may read further fields."""

    type: Literal["function"] = "function"
    function: FunctionTool


class NamedFunction(WireModel):
    """The function to call."""

    name: str


class NamedChoice(WireModel):
    """The tool to call."""

    type: Literal["function"] = "function"
    function: NamedFunction


class AllowedTools(WireModel):
    """A subset of the tools, and whether one must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedChoice], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedChoice(WireModel):
    """Which of the tools may or must be called."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class Thinking(WireModel):
    """Switches thinking."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: ThinkingBudget | None = None
    """Tokens of reasoning after which it is forced to end."""


class ChatBody(GenerationBody):
    """A conversation to answer."""

    messages: Annotated[list[ChatMessage], Field(max_length=MAX_MESSAGES)]
    max_tokens: int | None = None
    """Older name of `max_completion_tokens`."""
    max_completion_tokens: int | None = None
    """Most tokens of the answer; default: the rest of the context."""
    logprobs: bool | None = None
    """Return log probabilities."""
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    """Most likely alternatives returned per position; needs `logprobs`."""
    tools: Annotated[list[ChatTool], Field(max_length=MAX_TOOLS)] | None = None
    """Functions that the model may call."""
    tool_choice: Literal["auto", "none", "required"] | NamedChoice | AllowedChoice | None = None
    functions: Annotated[list[FunctionTool], Field(min_length=1, max_length=MAX_TOOLS)] | None = (
        None
    )
    """Older form of `tools`: at most one is called, in the message's `function_call`."""
    function_call: Literal["auto", "none"] | NamedFunction | None = None
    """Older form of `tool_choice`."""
    parallel_tool_calls: bool | None = None
    """Whether several functions may be called at once; default: true."""
    reasoning_effort: str | float | None = None
    """How much to think: none, minimal, low, medium, high, xhigh, ...; "none" disables thinking."""
    thinking: Thinking | None = None
    enable_thinking: bool | None = None
    thinking_budget: ThinkingBudget | None = None
    """Tokens of reasoning after which it is forced to end."""
    max_thinking_tokens: ThinkingBudget | None = None
    """Synonym of `thinking_budget`."""
    chat_template: str | None = None
    """Name of one of the model's chat templates."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template."""
    continue_final_message: bool | None = None
    """Continue the last message instead of answering it."""
    add_generation_prompt: bool | None = None
    separate_reasoning: bool | None = None
    """Return reasoning in `reasoning_content`; default: true."""
    stream_reasoning: bool | None = None
    """Stream reasoning as it arrives; default: true."""
    input_ids: TokenIds | None = None
    """The prompt as token IDs; replaces the rendering of `messages`."""
    return_prompt_token_ids: bool | None = None
    return_token_ids: bool | None = None
    return_meta_info: bool | None = None
    """Add `meta_info` to choices, in the format of `/generate`; in a stream, at the end of each."""
    return_input_ids_in_sglext: bool | None = None
    return_output_ids_in_sglext: bool | None = None


def continues_message(body: ChatBody) -> bool:
    """Whether to continue the last message instead of answering it.

    Raises:
        RequestError: The message to continue is not the last one, or not the assistant's.
    """
    for i, message in enumerate(body.messages):
        if message.prefix and (message.role != "assistant" or i + 1 < len(body.messages)):
            where = f"messages[{i}].prefix"
            raise RequestError(
                f"{where} is allowed only in the last message, if its role is assistant.",
                param=where,
            )
    return bool(body.continue_final_message or (body.messages and body.messages[-1].prefix))


def template_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Convert messages for chat templates: known roles, known content parts.

    Raises:
        RequestError: A part has an unknown type, or is empty.
    """
    return [_template_message(i, message) for i, message in enumerate(messages)]


def _template_message(i: int, message: ChatMessage) -> dict[str, Any]:
    plain = _plain_message(message)
    if message.role == "developer":
        plain["role"] = "system"
    elif message.role == "function":
        plain["role"] = "tool"
    if isinstance(message.content, list):
        parts = [
            part
            for j, given in enumerate(message.content)
            if (part := _part(given, f"messages[{i}].content[{j}]")) is not None
        ]
        plain["content"] = parts
    if "function_call" in plain:
        called = {"type": "function", "function": plain.pop("function_call")}
        plain.setdefault("tool_calls", []).append(called)
    for call in plain.get("tool_calls") or ():
        call["function"].setdefault("arguments", "{}")
    return plain


def _plain_message(message: ChatMessage) -> dict[str, Any]:
    """Return the fields of a message, as plain JSON values, without null ones and `prefix`."""
    if message.model_fields_set == _SHORT and isinstance(message.content, str):  # most messages
        return {"role": message.role, "content": message.content}
    return message.model_dump(exclude_none=True, exclude={"prefix"})


def _part(part: str | ContentPart, path: str) -> dict[str, Any] | None:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if part.type in _DROPPED_PARTS:
        return None
    if media_kind(part.type) is not None:
        return openai_media(part.model_dump(exclude_none=True), path)
    text = getattr(part, _TEXT_PARTS.get(part.type, ""), None) if part.type in _TEXT_PARTS else None
    if not isinstance(text, str):
        if part.type in _TEXT_PARTS:
            raise RequestError(f"{path}.text must be a string.", param=f"{path}.text")
        message = f"{path}: a part of type {part.type[:40]!r} is not known."
        raise RequestError(message, param=path)
    return {"type": "text", "text": text}


class CallReply(BaseModel):
    """The called function."""

    name: str
    arguments: str


class ToolCallReply(BaseModel):
    """A tool call."""

    id: str
    type: Literal["function"]
    index: int
    function: CallReply


class MessageReply(BaseModel):
    """The model's message."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallReply] | None = None
    function_call: CallReply | None = None


class ChatChoice(BaseModel):
    """One choice."""

    index: int
    message: MessageReply
    logprobs: dict[str, Any] | None = None
    finish_reason: (
        Literal["stop", "length", "tool_calls", "function_call", "content_filter", "abort"] | None
    )
    matched_stop: int | str | None = None


class ChatReply(BaseModel):
    """All choices."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageReply
    metadata: dict[str, Any]
    sglext: dict[str, Any] | None = None


class RenderReply(BaseModel):
    """A rendered conversation."""

    text: str
    """The prompt as text."""
    input_ids: list[int]
    """The prompt as token IDs."""
    count: int
    max_model_len: int

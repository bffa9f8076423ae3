"""Bodies of `/v1/responses`, and conversion of its items to chat messages."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from sylvan.api.media import media_kind, openai_media
from sylvan.api.native import ThinkingBudget
from sylvan.api.openai.chat import MAX_MESSAGES, MAX_TOOLS
from sylvan.api.openai.response_state import unpack
from sylvan.api.openai.response_tools import INPUT, ResponsesChoice, ResponsesTool, ToolReference
from sylvan.api.request_fields import Name, OptionFields, SamplingFields
from sylvan.api.sampling import OBJECT_SCHEMA
from sylvan.api.validation import WireModel
from sylvan.protocol.errors import RequestError

Item = dict[str, Any]

# records of hosted tools; the model here saw no such tool
_HOSTED_ITEMS = frozenset({
    "web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call",
    "computer_call", "computer_call_output", "local_shell_call", "local_shell_call_output",
    "shell_call", "shell_call_output", "mcp_call", "mcp_list_tools", "mcp_approval_request",
    "mcp_approval_response", "tool_search_call", "tool_search_output",
})  # fmt: skip
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")


class AllowedTools(WireModel):
    """Which of the tools may or must be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolReference], Field(min_length=1, max_length=MAX_TOOLS)]


Include = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class TextFormat(WireModel):
    """Format of the text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    @property
    def without_effect(self) -> Collection[str]:
        return ("name",)


class TextOptions(WireModel):
    """Options of the text."""

    format: TextFormat | None = None
    verbosity: str | None = None

    @property
    def without_effect(self) -> Collection[str]:
        return ("verbosity",)


class ReasoningOptions(WireModel):
    """How much to think."""

    effort: str | None = None
    budget_tokens: ThinkingBudget | None = None
    """Tokens of reasoning after which it is forced to end."""
    summary: str | None = None

    @property
    def without_effect(self) -> Collection[str]:
        return ("summary",)


class ConversationReference(WireModel):
    """A conversation, by ID."""

    id: Name


class ResponsesBody(SamplingFields, OptionFields):
    """Input to answer, optionally continuing an earlier response."""

    input: str | Annotated[list[Item], Field(max_length=MAX_MESSAGES)]
    """Text, or items: messages, calls and their results."""
    model: Name | None = None
    instructions: str | None = None
    """A system message for this response only."""
    max_output_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None
    """Limits calls of hosted tools; there are none here."""
    metadata: Annotated[dict[str, str], Field(max_length=64)] | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: Name | None = None
    """ID of a stored response to continue."""
    conversation: Name | ConversationReference | None = None
    """A stored conversation to continue; input and answer are appended to it."""
    reasoning: ReasoningOptions | None = None
    store: bool | None = True
    """Store the response, to be read or continued later."""
    stream: bool | None = None
    background: bool | None = None
    """Answer at once; the client polls the response by its ID."""
    include: Annotated[list[Include], Field(max_length=64)] | None = None
    """Additional output: log probabilities of the text, reasoning for the client to keep."""
    text: TextOptions | None = None
    tool_choice: Literal["auto", "none", "required"] | ResponsesChoice | AllowedTools | None = None
    tools: Annotated[list[ResponsesTool], Field(max_length=MAX_TOOLS)] | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    """Most likely alternatives in the log probabilities that `include` asks for."""
    truncation: Literal["disabled", "auto"] | None = None
    """`auto` drops the oldest turns of a conversation that is too long."""
    user: str | None = None
    request_id: Annotated[str, Field(pattern=r"^resp_[A-Za-z0-9_-]{1,64}$")] | None = None
    extra_key: Name | None = None
    cache_salt: Name | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class InputItemsQuery(WireModel):
    """Query of `/v1/responses/{id}/input_items`."""

    limit: Annotated[int, Field(ge=1, le=100)] = 20
    """Items per page."""
    order: Literal["asc", "desc"] = "desc"
    after: Name | None = None
    """ID of the item before the page."""


class InputItemsReply(BaseModel):
    """A page of items."""

    object: Literal["list"]
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokensReply(BaseModel):
    """Token count of an input."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class ResponsesReply(BaseModel):
    """A response."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    output: list[Item]
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    usage: dict[str, Any] | None
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None


def input_items(body: ResponsesBody) -> list[Item]:
    """Return the input as items.

    Raises:
        RequestError: It is empty.
    """
    if isinstance(body.input, str):
        if not body.input:
            raise RequestError("input must not be empty.", param="input")
        return [{"type": "message", "role": "user", "content": body.input}]
    if not body.input:
        raise RequestError("input must not be empty.", param="input")
    return body.input


def conversation_of(body: ResponsesBody) -> str | None:
    """Return the ID of the conversation to continue, if any."""
    named = body.conversation
    return named.id if isinstance(named, ConversationReference) else named


def chat_messages(items: Iterable[Item], instructions: str | None) -> list[Item]:
    """Convert items to chat messages; reasoning and calls join their assistant message.

    Raises:
        RequestError: An item is not supported.
    """
    messages: list[Item] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for i, item in enumerate(items):
        path = f"input[{i}]"
        kind = item.get("type", "message" if "role" in item else None)
        if kind == "message":
            _add_message(messages, item, path)
        elif kind == "reasoning":
            parts = item.get("content") or item.get("summary") or []
            thinking = _content(parts, f"{path}.content")
            thinking = thinking or unpack(item.get("encrypted_content")) or ""
            _assistant(messages)["reasoning_content"] = thinking
        elif kind in ("function_call", "custom_tool_call"):
            _add_call(messages, item, path)
        elif kind in _HOSTED_ITEMS:
            continue
        elif kind in ("function_call_output", "custom_tool_call_output"):
            content = _content(item.get("output", ""), f"{path}.output")
            call = _string(item, "call_id", path)
            messages.append({"role": "tool", "tool_call_id": call, "content": content})
        else:
            raise RequestError(
                f"{path}.type: {str(kind)[:40]!r} is not supported.", param=f"{path}.type"
            )
    return messages


def _add_message(messages: list[Item], item: Item, path: str) -> None:
    role = item.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        message = f"{path}.role: expected user, assistant, system or developer."
        raise RequestError(message, param=f"{path}.role")
    if role == "user" and isinstance(item.get("content"), list):
        content: Any = _parts(item["content"], f"{path}.content")
    else:
        content = _content(item.get("content"), f"{path}.content")
    if role == "assistant":
        last = _assistant(messages)
        last["content"] = last.get("content", "") + content
        return
    messages.append({"role": "system" if role == "developer" else role, "content": content})


def _add_call(messages: list[Item], item: Item, path: str) -> None:
    name = _string(item, "name", path)
    if isinstance(item.get("namespace"), str):
        name = f"{item['namespace']}.{name}"
    if item["type"] == "custom_tool_call":
        arguments = json.dumps({INPUT: _string(item, "input", path)}, ensure_ascii=False)
    else:
        arguments = _string(item, "arguments", path)
    function = {"name": name, "arguments": arguments}
    call = {"id": _string(item, "call_id", path), "type": "function", "function": function}
    _assistant(messages).setdefault("tool_calls", []).append(call)


def _assistant(messages: list[Item]) -> Item:
    """Return the final assistant message; a new one if the last message has another role."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _string(item: Item, name: str, path: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{path}.{name} must be a string.", param=f"{path}.{name}")
    return value


def _parts(parts: list[Any], path: str) -> str | list[Item]:
    """Return text, or content parts for templates if there is media."""
    kinds = [part.get("type") if isinstance(part, dict) else None for part in parts]
    if not any(isinstance(kind, str) and media_kind(kind) for kind in kinds):
        return _content(parts, path)
    found: list[Item] = []
    for j, (kind, part) in enumerate(zip(kinds, parts, strict=True)):
        if isinstance(kind, str) and media_kind(kind):
            found.append(openai_media(part, f"{path}[{j}]"))
        else:
            found.append({"type": "text", "text": _content([part], f"{path}")})
    return found


def _content(content: Any, path: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{path} must be a string or a list of parts.", param=path)
    texts: list[str] = []
    for j, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if kind else None
        if kind not in _TEXT_PARTS or not isinstance(text, str):
            message = f"{path}[{j}]: a part of type {str(kind)[:40]!r} is not allowed here."
            raise RequestError(message, param=f"{path}[{j}]")
        texts.append(text)
    return "".join(texts)


def text_schema(body: ResponsesBody) -> str | None:
    """Return the JSON schema for the text, if any."""
    wanted = body.text.format if body.text else None
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object" and not wanted.schema_:
        return OBJECT_SCHEMA
    if wanted.schema_ is None:
        raise RequestError("text.format.schema must be given.", param="text.format.schema")
    return json.dumps(wanted.schema_)


def text_fields(body: ResponsesBody) -> Mapping[str, str]:
    """Map the engine's `json_schema` to a field of the body."""
    wanted = body.text.format if body.text else None
    whole = wanted is None or wanted.schema_ is None
    return {"json_schema": "text.format" if whole else "text.format.schema"}

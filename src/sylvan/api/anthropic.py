"""Bodies of the Anthropic API, and conversion of its messages to OpenAI's format."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from sylvan.api.anthropic_documents import document_text, search_text
from sylvan.api.anthropic_tools import client_run, is_built_in
from sylvan.api.media import anthropic_media
from sylvan.api.request_fields import Name, OptionFields, Rid
from sylvan.api.validation import WireModel, parse
from sylvan.protocol.errors import RequestError

MIN_THINKING_TOKENS = 1024
MAX_MESSAGES = 65536
MAX_TOOLS = 1024

_IGNORED_BLOCKS = ("redacted_thinking", "tool_reference")
_READ = {
    "text": frozenset({"text"}),
    "thinking": frozenset({"thinking"}),
    "tool_use": frozenset({"id", "name", "input"}),
    "tool_result": frozenset({"tool_use_id", "content", "is_error"}),
    "image": frozenset({"source"}),
    "document": frozenset({"source", "title", "context"}),
    "search_result": frozenset({"source", "title", "content"}),
}
_BLOCK_FIELDS = frozenset({"signature"}).union(*_READ.values())


class Block(WireModel):
    """A content block of a message. Its type determines its fields."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[dict[str, Any]] | None = None
    is_error: bool | None = None
    source: dict[str, Any] | str | None = None
    """For an image: base64 or URL; for a document: its text; for a search result: its origin."""
    title: str | None = None
    context: str | None = None

    @property
    def without_effect(self) -> Collection[str]:
        return _BLOCK_FIELDS - _READ.get(self.type, frozenset())


class Message(WireModel):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Tool(WireModel):
    """A tool that the model may call."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def passes_on(self) -> bool:
        """Fields of server tools are not validated."""
        return self.type not in (None, "custom") and is_built_in(self.type)


class ToolChoice(WireModel):
    """Whether to call a tool, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(WireModel):
    """Whether to think before answering."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None

    @property
    def without_effect(self) -> Collection[str]:
        return ("display",)


class OutputFormat(WireModel):
    """A JSON schema for the answer."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(WireModel):
    """Options of the answer."""

    effort: str | None = None
    format: OutputFormat | None = None
    task_budget: dict[str, Any] | None = None

    @property
    def without_effect(self) -> Collection[str]:
        return ("task_budget",)


class CountBody(WireModel):
    """A conversation to count the tokens of."""

    model: Name
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[Block] | None = None
    thinking: ThinkingConfig | None = None
    tool_choice: ToolChoice | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    output_config: OutputConfig | None = None


class MessagesBody(CountBody, OptionFields):
    """A conversation to answer."""

    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)]
    """Most tokens of the answer."""
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    betas: list[str] | None = None
    rid: Rid | None = None

    @property
    def without_effect(self) -> Collection[str]:
        return ("betas",)


class AnthropicUsage(BaseModel):
    """Token counts; the prompt is the sum of the three input counts."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int


class AnthropicMessage(BaseModel):
    """The model's message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: AnthropicUsage


class CountReply(BaseModel):
    """Token count of a conversation."""

    input_tokens: int


def openai_messages(body: CountBody) -> list[dict[str, Any]]:
    """Convert the conversation to OpenAI's format.

    Raises:
        RequestError: A block is not supported.
    """
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _text(body.system, "system")})
    for i, message in enumerate(body.messages):
        path = f"messages[{i}].content"
        if isinstance(message.content, str):
            messages.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            messages.append(_assistant(message.content, path))
        else:
            messages.extend(_user(message.role, message.content, path))
    return messages


def _assistant(blocks: list[Block], path: str) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for j, block in enumerate(blocks):
        if block.type == "tool_use":
            if block.name is None:
                raise RequestError(f"{path}[{j}].name must be given.", param=f"{path}[{j}].name")
            function = {"name": block.name, "arguments": json.dumps(block.input or {})}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type not in _IGNORED_BLOCKS:
            texts.append(_block_text(block, f"{path}[{j}]"))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _user(role: str, blocks: list[Block], path: str) -> list[dict[str, Any]]:
    """Convert a user message: tool results become messages of their own, before the text."""
    results: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for j, block in enumerate(blocks):
        if block.type == "tool_result":
            content = _result(block, f"{path}[{j}]")
            results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
        elif block.type == "image":
            parts.append(anthropic_media(block.source, f"{path}[{j}]"))
        elif block.type not in _IGNORED_BLOCKS:
            parts.append({"type": "text", "text": _block_text(block, f"{path}[{j}]")})
    if parts or not results:
        is_text = all(part["type"] == "text" for part in parts)
        texts = "\n".join(part["text"] for part in parts) if is_text else ""
        results.append({"role": role, "content": texts if is_text else parts})
    return results


def _result(block: Block, path: str) -> str:
    content = block.content
    if isinstance(content, list):
        texts = [_part_text(part, f"{path}.content[{i}]") for i, part in enumerate(content)]
        content = "".join(texts)
    return f"Error: {content or ''}" if block.is_error else content or ""


def _text(blocks: str | list[Block], path: str) -> str:
    if isinstance(blocks, str):
        return blocks
    return "\n".join(_block_text(block, f"{path}[{j}]") for j, block in enumerate(blocks))


def _part_text(part: dict[str, Any], path: str) -> str:
    try:
        block = parse(Block, {"type": "?", **part})
    except RequestError as error:
        param = f"{path}.{error.param}" if error.param else path
        raise RequestError(f"{path}: {error}", param=param) from error
    return _block_text(block, path)


def _block_text(block: Block, path: str) -> str:
    if block.type == "document":
        return document_text(block.__dict__, path)
    if block.type == "search_result":
        return search_text(block.__dict__, path)
    if block.type != "text":
        message = f"{path}: a block of type {block.type[:40]!r} is not allowed here."
        raise RequestError(message, param=path)
    if block.text is None:
        raise RequestError(f"{path}.text must be given.", param=f"{path}.text")
    return block.text


def openai_tools(body: CountBody) -> tuple[list[dict[str, Any]], list[str]]:
    """Convert the tools to OpenAI's format; also return the paths of tools the model does not see.

    Raises:
        RequestError: A tool is unknown.
    """
    tools: list[dict[str, Any]] = []
    left_out: list[str] = []
    for i, tool in enumerate(body.tools or ()):
        if tool.type in (None, "custom"):
            function: dict[str, Any] = {"parameters": tool.input_schema or {"type": "object"}}
        elif (known := client_run(tool.type)) is not None:
            function = dict(known)
        elif is_built_in(tool.type):
            left_out.append(f"tools[{i}]")
            continue
        else:
            path = f"tools[{i}].type"
            message = f"{path}: there is no tool of the type {tool.type[:40]!r}."
            raise RequestError(message, param=path)
        if tool.description:
            function["description"] = tool.description
        if tool.strict:
            function["strict"] = True
        tools.append({"type": "function", "function": {"name": tool.name, **function}})
    return tools, left_out


def check_thinking(thinking: ThinkingConfig | None) -> None:
    """Check the thinking budget.

    Raises:
        RequestError: It is missing or too small; the message names the limit.
    """
    if thinking is None or thinking.type != "enabled":
        return
    path = "thinking.budget_tokens"
    if thinking.budget_tokens is None:
        raise RequestError(f"{path} must be given when thinking is enabled.", param=path)
    if thinking.budget_tokens < MIN_THINKING_TOKENS:
        raise RequestError(f"{path}: expected at least {MIN_THINKING_TOKENS}.", param=path)

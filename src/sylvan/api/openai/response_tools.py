"""Tools of `/v1/responses`: which functions the model gets, and which tool each call belongs to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from sylvan.api.openai.chat import MAX_TOOL_NAME, MAX_TOOLS
from sylvan.api.validation import WireModel
from sylvan.protocol.errors import RequestError

INPUT = "input"
"""The only argument of the function that replaces a custom tool."""

_HOSTED = frozenset({
    "web_search", "web_search_preview", "web_search_preview_2025_03_11", "web_search_2025_08_26",
    "code_interpreter", "file_search", "image_generation", "computer_use_preview", "local_shell",
    "shell", "mcp", "apply_patch", "tool_search",
})  # fmt: skip


class ResponsesTool(WireModel):
    """A function, a custom tool, a namespace of functions, or a hosted tool."""

    type: str
    name: Annotated[str, Field(min_length=1, max_length=MAX_TOOL_NAME)] | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None
    """For a custom tool: the format of its input."""
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None
    """For a namespace: its functions."""

    @property
    def passes_on(self) -> bool:
        """Hosted tools are kept as a whole."""
        return self.type in _HOSTED


class ToolReference(WireModel):
    """A tool, by name."""

    type: str
    name: str | None = None
    namespace: str | None = None


class ResponsesChoice(WireModel):
    """The tool to call."""

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class ToolOrigin:
    """The client's tool behind a function that the model is offered."""

    name: str
    namespace: str | None = None
    custom: bool = False


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """Tools in the format of chat completions.

    Attributes:
        tools: The functions that the model is offered.
        origins: The client's tools, by function name.
        left_out: Paths of accepted tools that are not offered: nothing here could run them.
    """

    tools: Sequence[dict[str, Any]]
    origins: Mapping[str, ToolOrigin]
    left_out: Sequence[str] = ()

    def name_of(self, wanted: ToolReference | ResponsesChoice, path: str) -> str:
        """Return the function name under which a tool is offered.

        Raises:
            RequestError: The tool is not offered.
        """
        for name, origin in self.origins.items():
            if (origin.name, origin.namespace) == (wanted.name, wanted.namespace):
                return name
        shown = str(wanted.name or wanted.type)[:80]
        raise RequestError(f"{path}: {shown!r} is not one of the tools to call.", param=path)

    def only(self, names: set[str]) -> OfferedTools:
        """Return the same with fewer tools."""
        tools = [tool for tool in self.tools if tool["function"]["name"] in names]
        return OfferedTools(tools, self.origins, self.left_out)


def offered_tools(tools: Sequence[ResponsesTool]) -> OfferedTools:
    """Convert tools to functions.

    Raises:
        RequestError: A tool's type is unknown, or its name is missing.
    """
    found: list[dict[str, Any]] = []
    origins: dict[str, ToolOrigin] = {}
    left_out: list[str] = []

    def add(function: dict[str, Any], origin: ToolOrigin) -> None:
        found.append({"type": "function", "function": function})
        origins[function["name"]] = origin

    for i, tool in enumerate(tools):
        if tool.type in _HOSTED:
            left_out.append(f"tools[{i}]")
            continue
        if tool.type not in ("function", "custom", "namespace"):
            path = f"tools[{i}].type"
            raise RequestError(f"{path}: there is no tool {tool.type[:40]!r}.", param=path)
        if tool.name is None:
            raise RequestError(f"tools[{i}].name must be given.", param=f"tools[{i}].name")
        if tool.type == "function":
            fields = {"name", "description", "parameters", "strict"}
            add(tool.model_dump(include=fields, exclude_none=True), ToolOrigin(tool.name))
        elif tool.type == "custom":
            add(_custom(tool), ToolOrigin(tool.name, custom=True))
        else:
            for member in _members(tool, f"tools[{i}].tools"):
                name = f"{tool.name}.{member['name']}"
                add({**member, "name": name}, ToolOrigin(member["name"], tool.name))
    return OfferedTools(found, origins, left_out)


def _custom(tool: ResponsesTool) -> dict[str, Any]:
    """Convert a custom tool to a function; its grammar goes into the description, as in SGLang."""
    words = [tool.description] if tool.description else []
    if tool.format and tool.format.get("type") == "grammar":
        syntax, definition = tool.format.get("syntax", "lark"), tool.format.get("definition", "")
        words.append(f"The input must follow this {syntax} grammar:\n{definition}")
    schema = {
        "type": "object",
        "properties": {INPUT: {"type": "string", "description": "The input, as plain text."}},
        "required": [INPUT],
        "additionalProperties": False,
    }
    described = {"description": "\n\n".join(words)} if words else {}
    return {"name": tool.name, **described, "parameters": schema}


def _members(tool: ResponsesTool, path: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for j, given in enumerate(tool.tools or ()):
        member = given.get("function", given)
        name = member.get("name") if isinstance(member, dict) else None
        if given.get("type", "function") != "function" or not isinstance(name, str) or not name:
            message = f"{path}[{j}]: expected a function with a name."
            raise RequestError(message, param=f"{path}[{j}]")
        fields = ("name", "description", "parameters", "strict")
        found.append({key: member[key] for key in fields if member.get(key) is not None})
    return found

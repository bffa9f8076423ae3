"""Tool choice of a chat: tools, a subset of them, or legacy functions."""

from __future__ import annotations

from typing import Any

from sylvan.api.answering import ToolUse
from sylvan.api.openai.chat import AllowedChoice, ChatBody, NamedChoice, NamedFunction
from sylvan.protocol.errors import RequestError

Tool = dict[str, Any]


def tool_use(body: ChatBody) -> ToolUse:
    """Read the tools of a body.

    Raises:
        RequestError: It chooses an unknown tool, or has both tools and functions.
    """
    if body.functions is not None or body.function_call is not None:
        return _functions(body)
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    for tool in tools:
        tool.setdefault("type", "function")
    choice = body.tool_choice or "auto"
    if isinstance(choice, AllowedChoice):
        allowed = choice.allowed_tools
        names = [tool.function.name for tool in allowed.tools]
        for i, name in enumerate(names):
            _check(name, tools, f"tool_choice.allowed_tools.tools[{i}]")
        tools, choice = [tool for tool in tools if _name(tool) in names], allowed.mode
    elif isinstance(choice, NamedChoice):
        choice = choice.function.name
        _check(choice, tools, "tool_choice")
    if choice == "required" and not tools:
        raise RequestError("tool_choice 'required' needs tools.", param="tool_choice")
    return ToolUse(tools=tools, choice=choice, parallel=body.parallel_tool_calls is not False)


def _functions(body: ChatBody) -> ToolUse:
    """Read legacy functions: at most one is called."""
    for name in ("tools", "tool_choice"):
        if getattr(body, name) is not None:
            message = f"{name}: use either tools or functions, not both."
            raise RequestError(message, param=name)
    given = body.functions or ()
    tools = [{"type": "function", "function": f.model_dump(exclude_none=True)} for f in given]
    choice = body.function_call or "auto"
    if isinstance(choice, NamedFunction):
        choice = choice.name
        _check(choice, tools, "function_call")
    return ToolUse(tools=tools, choice=choice, parallel=False)


def _check(name: str, tools: list[Tool], path: str) -> None:
    if not any(_name(tool) == name for tool in tools):
        message = f"{path} names {name[:80]!r}, which is not one of the tools."
        raise RequestError(message, param=path)


def _name(tool: Tool) -> str:
    return tool["function"]["name"]

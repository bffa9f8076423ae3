"""Tool calls and finish reasons of chat choices."""

from __future__ import annotations

from typing import Any

from sylvan.protocol.messages import Finish
from sylvan.runtime.server.context import Context
from sylvan.text.output import ParsedOutput


def finish_name(finish: Finish | None, *, calls: bool, is_legacy: bool = False) -> str | None:
    """Return the `finish_reason` of a chat choice; `is_legacy`: with functions instead of tools."""
    if finish is None:
        return None
    called = "function_call" if is_legacy else "tool_calls"
    return called if calls and finish.type == "stop" else finish.type


def call_id(context: Context, name: str, index: int) -> str:
    """Make the ID of a tool call; some model families require their own format."""
    family = context.parsers.tools
    if family is not None and family.call_id is not None:
        return family.call_id.format(name=name, index=index)
    return f"call_{context.ids(12)}"


def tool_calls(context: Context, answer: ParsedOutput) -> list[dict[str, Any]]:
    """Build the `tool_calls` of a message."""
    return [
        {
            "id": call_id(context, call.name, i),
            "type": "function",
            "index": i,
            "function": {"name": call.name, "arguments": call.arguments or "{}"},
        }
        for i, call in enumerate(answer.calls)
    ]

"""Conversations as templates render them."""

from __future__ import annotations

from typing import Any

from sylvan.api.openai.chat import ChatBody, template_messages
from sylvan.text.chat_template import ChatRequest


def tools_of(body: ChatBody) -> list[dict[str, Any]]:
    """The tools that a template shows; none where the model may not call."""
    if body.tool_choice == "none":
        return []
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    for tool in tools:
        tool.setdefault("type", "function")
    return tools


def template_request(body: ChatBody, tools: list[dict[str, Any]]) -> ChatRequest:
    """What a template is asked to render for `/v1/chat/completions`."""
    variables: dict[str, Any] = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    if body.enable_thinking is not None:
        variables.setdefault("enable_thinking", body.enable_thinking)
        variables.setdefault("thinking", body.enable_thinking)
    going_on = bool(body.continue_final_message)
    start = not going_on if body.add_generation_prompt is None else body.add_generation_prompt
    return ChatRequest(
        messages=template_messages(body.messages),
        tools=tools or None,
        add_generation_prompt=start,
        continue_final_message=going_on,
        kwargs=variables,
    )

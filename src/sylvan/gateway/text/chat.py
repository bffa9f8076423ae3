"""Conversations as input of chat templates."""

from __future__ import annotations

from sylvan.api.answering import ToolUse, thinking_variables
from sylvan.api.openai.chat import ChatBody, template_messages
from sylvan.text.chat_template import ChatRequest


def template_request(body: ChatBody, use: ToolUse) -> ChatRequest:
    """Build the template input of a `/v1/chat/completions` body."""
    switch = body.enable_thinking
    if body.thinking is not None and body.thinking.type != "adaptive":
        switch = body.thinking.type == "enabled"
    going_on = bool(body.continue_final_message)
    start = not going_on if body.add_generation_prompt is None else body.add_generation_prompt
    return ChatRequest(
        messages=template_messages(body.messages),
        tools=use.tools if use.tools and use.choice != "none" else None,
        add_generation_prompt=start,
        continue_final_message=going_on,
        kwargs={
            **thinking_variables(effort=body.reasoning_effort, enabled=switch),
            **(body.chat_template_kwargs or {}),
        },
    )


def last_text(request: ChatRequest) -> str:
    """Return the text of the last message, which the answer continues."""
    content = request.messages[-1].get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text") or "") for part in content)

"""Conversations to prompts, off the event loop where that takes long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sylvan.protocol.errors import ContextLengthError
from sylvan.runtime.server.context import Context
from sylvan.runtime.tokenizer.checks import MAX_CHARS_PER_TOKEN
from sylvan.text.chat_template import ChatRequest, RenderedPrompt
from sylvan.utils.threads import call_in_thread

INLINE_CHARS = 8192  # rendering and tokenising as much takes under 2 ms


async def render_chat(context: Context, request: ChatRequest) -> RenderedPrompt:
    """Render and tokenise a conversation.

    Raises:
        RequestError: The template refuses the messages, there is no template, or no context holds
            as many characters.
    """
    length = context.engine.facts.context_len
    for field, items in (("messages", request.messages), ("tools", request.tools)):
        size = _size(items)
        if size > MAX_CHARS_PER_TOKEN * length:
            raise ContextLengthError.of_text(size, length, field)
    if _size(request.messages) + _size(request.tools) <= INLINE_CHARS:
        return context.template.render(request)
    return await call_in_thread(context.template.render, request)


def _size(items: Sequence[Mapping[str, Any]] | None) -> int:
    """About how many characters; contents that are no plain strings count as long."""
    total = 0
    for item in items or ():
        for value in item.values():
            total += len(value) if isinstance(value, str) else 256
            if isinstance(value, list):
                total += sum(
                    len(str(part.get("text", ""))) for part in value if isinstance(part, dict)
                )
    return total

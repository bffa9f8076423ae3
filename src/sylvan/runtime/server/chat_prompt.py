"""Conversations to prompts, off the event loop where that takes long."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, cast

from sylvan.protocol.errors import ContextLengthError
from sylvan.runtime.server.context import Context
from sylvan.runtime.tokenizer.checks import MAX_CHARS_PER_TOKEN
from sylvan.text.chat_template import ChatRequest, RenderedPrompt
from sylvan.utils.threads import call_in_thread

_PUNCTUATION = 4  # characters around a value
_MEDIA = ("image", "image_url", "video", "video_url", "audio", "audio_url", "input_audio")
INLINE_CHARS = 8192  # rendering and tokenising as much takes under 2 ms


async def render_chat(context: Context, request: ChatRequest) -> RenderedPrompt:
    """Render and tokenise a conversation.

    Raises:
        RequestError: The template refuses the messages, there is no template, or no context holds
            as many characters.
    """
    parts = (_texts(request.messages), request.tools or ())
    if _size(parts, INLINE_CHARS) <= INLINE_CHARS:
        return _render(context, request)
    return await call_in_thread(_render, context, request)


def _render(context: Context, request: ChatRequest) -> RenderedPrompt:
    length = context.engine.facts.context_len
    most = MAX_CHARS_PER_TOKEN * length
    for field, items in (("messages", _texts(request.messages)), ("tools", request.tools or ())):
        size = _size(items, most)
        if size > most:
            raise ContextLengthError.of_text(size, length, field)
    return context.template.render(request)


def _texts(messages: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    """What a template writes of messages: of images and the like only a mark."""
    for message in messages:
        for name, value in message.items():
            if name == "content" and isinstance(value, list):
                yield from (part for part in cast(list[Any], value) if not _is_media(part))
            else:
                yield value


def _is_media(part: Any) -> bool:
    return isinstance(part, dict) and cast(dict[str, Any], part).get("type") in _MEDIA


def _size(items: Iterable[Any], most: int) -> int:
    """About how many characters values have, as JSON; counted until they are more than `most`."""
    total = 0
    left = [iter(items)]
    while left and total <= most:
        value = next(left[-1], left)
        total += _PUNCTUATION
        if value is left:
            left.pop()
        elif isinstance(value, str):
            total += len(value)
        elif isinstance(value, Mapping):
            left.append(chain.from_iterable(cast(Mapping[str, Any], value).items()))
        elif isinstance(value, Iterable):
            left.append(iter(cast(Iterable[Any], value)))
    return total

"""Texts with images, videos and sounds to embed: rendered as a conversation."""

from __future__ import annotations

import msgspec

from sylvan.api.media import split_media
from sylvan.api.openai.vectors import MediaInput
from sylvan.runtime.tokenizer.types import EmbedInput
from sylvan.text.chat_template import ChatRequest, ChatTemplate
from sylvan.utils.threads import call_in_thread


async def media_input(
    chat: ChatTemplate, given: MediaInput, path: str, asked: EmbedInput
) -> EmbedInput:
    """Return what is embedded: the conversation up to where an answer would begin.

    That is how Qwen3-VL-Embedding was trained
    (https://github.com/QwenLM/Qwen3-VL-Embedding).

    Args:
        chat: The model's template.
        given: The input.
        path: Its path in the body.
        asked: All else that is asked for.

    Raises:
        RequestError: It is empty, or the model has no template for it.
    """
    messages, sources = split_media(given.messages(path))
    prompt = await call_in_thread(chat.render, ChatRequest(messages=messages))
    return msgspec.structs.replace(asked, input_ids=prompt.input_ids, media=tuple(sources))

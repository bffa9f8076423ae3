"""Converts embedding inputs with images, videos or audio to engine input."""

from __future__ import annotations

import msgspec

from sylvan.api.media import split_media
from sylvan.api.openai.vectors import MediaInput
from sylvan.media.source import MediaSource
from sylvan.protocol.errors import RequestError
from sylvan.runtime.serving.retrieval import RetrievalPrompts
from sylvan.runtime.tokenizer.types import EmbedInput, ServedModelInfo
from sylvan.text.chat_template import ChatRequest, ChatTemplate
from sylvan.text.tokenizer import Tokenizer
from sylvan.utils.threads import call_in_thread


async def media_input(
    chat: ChatTemplate, given: MediaInput, path: str, asked: EmbedInput
) -> EmbedInput:
    """Render the input as a conversation, up to where an answer would begin.

    Qwen3-VL-Embedding was trained this way (https://github.com/QwenLM/Qwen3-VL-Embedding).

    Args:
        chat: The model's template.
        given: The input.
        path: Its path in the body.
        asked: The request's other fields.

    Raises:
        RequestError: It is empty, or the model has no template for it.
    """
    messages, sources = split_media(given.messages(path))
    prompt = await call_in_thread(chat.render, ChatRequest(messages=messages))
    return msgspec.structs.replace(asked, input_ids=prompt.input_ids, media=tuple(sources))


def item_input(
    given: MediaInput, path: str, asked: EmbedInput, facts: ServedModelInfo
) -> EmbedInput:
    """Return the input for a model with separate encoders (CLIP): one item, or a text.

    Raises:
        RequestError: The input is neither.
    """
    if given.text and not (given.image or given.video or given.audio) and not given.instruct:
        return msgspec.structs.replace(asked, text=given.text)
    source = _only_item(given, path)
    token = facts.media_tokens.get(source.kind)
    if token is None:
        message = f"{source.path}: this model embeds texts and images, no {source.kind}."
        raise RequestError(message, param=source.path)
    return msgspec.structs.replace(asked, input_ids=[token], media=(source,))


def page_input(
    given: MediaInput,
    path: str,
    asked: EmbedInput,
    prompts: RetrievalPrompts,
    facts: ServedModelInfo,
    tokenizer: Tokenizer,
) -> EmbedInput:
    """Return the input for a model that retrieves pages: the image of a page, or a text as query.

    Raises:
        RequestError: The input is neither.
    """
    if given.text and not (given.image or given.video or given.audio) and not given.instruct:
        ids = prompts.of_query(given.text, tokenizer)
        return msgspec.structs.replace(asked, input_ids=ids)
    source = _only_item(given, path)
    image = facts.media_tokens.get("image")
    if source.kind != "image" or image is None:
        message = f"{source.path}: this model embeds texts and images, no {source.kind}."
        raise RequestError(message, param=source.path)
    ids = prompts.of_page(image, tokenizer)
    return msgspec.structs.replace(asked, input_ids=ids, media=(source,))


def _only_item(given: MediaInput, path: str) -> MediaSource:
    """Return the only item of an input.

    Raises:
        RequestError: The input also has a text or an instruction, or has several items.
    """
    _, sources = split_media(given.messages(path))
    for name in ("text", "instruct"):
        if getattr(given, name):
            message = f"{path}.{name}: this model embeds a text or an image, not both together."
            raise RequestError(message, param=f"{path}.{name}")
    if len(sources) > 1:
        message = f"{path}: this model embeds one image at a time, not {len(sources)} together."
        raise RequestError(message, param=path)
    return sources[0]

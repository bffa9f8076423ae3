"""PDF documents of Anthropic messages: each page becomes an image."""

from __future__ import annotations

from sylvan.api.anthropic import Block, CountBody
from sylvan.api.anthropic_documents import pdf_source
from sylvan.media.source import MediaSource, read_source
from sylvan.protocol.errors import RequestError
from sylvan.runtime.tokenizer.manager import TokenizerManager


async def draw_documents(body: CountBody, engine: TokenizerManager) -> None:
    """Replace each PDF document in messages of the user by its title and the images of its pages.

    Raises:
        RequestError: A document cannot be read, or the model takes no images; names the block.
    """
    for i, message in enumerate(body.messages):
        if message.role != "user" or isinstance(message.content, str):
            continue
        blocks: list[Block] = []
        for j, block in enumerate(message.content):
            path = f"messages[{i}].content[{j}]"
            given = pdf_source(block.__dict__) if block.type == "document" else None
            if given is None:
                blocks.append(block)
                continue
            if engine.media is None or "image" not in engine.facts.media_tokens:
                why = f"{path}: this model takes no images, which the pages of a PDF would be."
                raise RequestError(why, param=path)
            blocks += _heads(block)
            blocks += [_image(page) for page in await engine.media.pages(_source(given, path))]
        message.content = blocks


def _source(given: object, path: str) -> MediaSource:
    assert isinstance(given, dict)
    if given["type"] == "url":
        return read_source("image", given.get("url"), f"{path}.source.url")
    return read_source("image", given.get("data"), f"{path}.source.data")


def _heads(block: Block) -> list[Block]:
    texts = [text for text in (block.title, block.context) if text]
    return [Block(type="text", text="\n".join(texts) + "\n")] if texts else []


def _image(page: bytes) -> Block:
    source = {"type": "base64", "media_type": "image/png", "data": page}
    return Block(type="image", source=source)

"""Renders documents and search results of Anthropic messages as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sylvan.protocol.errors import RequestError

PDF = "application/pdf"


def pdf_source(block: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the source of a PDF document; None: the document is another."""
    source = block.get("source")
    given: Mapping[str, Any] = source if isinstance(source, Mapping) else {}
    is_file = given.get("type") == "base64" and given.get("media_type") == PDF
    return given if is_file or given.get("type") == "url" else None


def document_text(block: Mapping[str, Any], path: str) -> str:
    """Return the text of a document, with its title and context.

    Args:
        block: Block with `source`, and optionally `title` and `context`.
        path: Its path in the body.

    Raises:
        RequestError: It is not plain text.
    """
    source = block.get("source")
    given: Mapping[str, Any] = source if isinstance(source, Mapping) else {}
    kind = given.get("type")
    if kind == "text" and isinstance(given.get("data"), str):
        text = given["data"]
    elif kind == "content":
        text = _texts(given.get("content"), f"{path}.source.content")
    else:
        message = (
            f"{path}.source: a document is plain text (a source of type text or content), or a PDF "
            "in a message of the user (a source of type base64 or url)."
        )
        raise RequestError(message, param=f"{path}.source")
    return _titled(block, text, "title", "context")


def search_text(block: Mapping[str, Any], path: str) -> str:
    """Return the text of a search result, with its title and source.

    Raises:
        RequestError: It contains no text.
    """
    return _titled(block, _texts(block.get("content"), f"{path}.content"), "title", "source")


def _titled(block: Mapping[str, Any], text: str, *names: str) -> str:
    heads = [value for name in names if isinstance(value := block.get(name), str) and value]
    return "\n".join([*heads, text])


def _texts(content: object, path: str) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [None]
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise RequestError(f"{path}: expected text, or blocks of text.", param=path)
    return "\n".join(str(text) for text in texts)

"""Texts to guess from: bodies and replies, as SGLang has them."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from sylvan.api.validation import WireModel

MAX_NAME_CHARS = 256
MAX_TEXTS = 100_000
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]


class AddCorpusBody(WireModel):
    """Texts, as documents or as token ids; one of both."""

    corpus_id: Name | None = None
    """Name; another corpus of that name is replaced. Left out: one is made up."""
    documents: Annotated[list[str], Field(max_length=MAX_TEXTS)] | None = None
    """Texts."""
    token_chunks: Annotated[list[list[int]], Field(max_length=MAX_TEXTS)] | None = None
    """Token ids of texts."""
    file_path: str | None = None
    """Not supported: give documents, or speculative.corpus when the server starts."""


class RemoveCorpusBody(WireModel):
    """Which corpus to remove."""

    corpus_id: Name
    """Its name."""


class CorpusReply(BaseModel):
    """What became of a corpus."""

    success: bool = True
    corpus_id: str = ""
    message: str = ""
    loaded_token_count: int = 0


class CorporaReply(BaseModel):
    """All corpora, with their tokens."""

    success: bool = True
    corpus_ids: list[str]
    corpus_token_counts: dict[str, int]
    message: str = ""

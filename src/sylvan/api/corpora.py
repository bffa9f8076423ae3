"""Bodies of the corpus routes of speculative decoding, in SGLang's format."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from sylvan.api.validation import WireModel

MAX_NAME_CHARS = 256
MAX_TEXTS = 100_000
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]


class AddCorpusBody(WireModel):
    """Texts to draft from, as documents or as token IDs; exactly one of them."""

    corpus_id: Name | None = None
    """Name; replaces a corpus of the same name. Generated if not given."""
    documents: Annotated[list[str], Field(max_length=MAX_TEXTS)] | None = None
    """Texts."""
    token_chunks: Annotated[list[list[int]], Field(max_length=MAX_TEXTS)] | None = None
    """Token IDs of texts."""
    file_path: str | None = None
    """Not supported: send `documents`, or set `speculative.corpus` at start-up."""


class RemoveCorpusBody(WireModel):
    """The corpus to remove."""

    corpus_id: Name
    """Its name."""


class CorpusReply(BaseModel):
    """A corpus and its size."""

    success: bool = True
    corpus_id: str = ""
    message: str = ""
    loaded_token_count: int = 0


class CorporaReply(BaseModel):
    """All corpora, with their token counts."""

    success: bool = True
    corpus_ids: list[str]
    corpus_token_counts: dict[str, int]
    message: str = ""

"""Bodies of rankings in the formats of Cohere, Jina and Text Embeddings Inference (TEI)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from sylvan.api.openai.vectors import MAX_INPUTS
from sylvan.api.request_fields import Name
from sylvan.api.validation import WireModel


class TextDocument(WireModel):
    """A document as an object."""

    text: str


Documents = Annotated[list[str | TextDocument], Field(min_length=1, max_length=MAX_INPUTS)]


class CohereRerankBody(WireModel):
    """Documents to rank, in Cohere's format."""

    query: str
    documents: Documents
    model: Name | None = None
    top_n: Annotated[int, Field(ge=1)] | None = None
    max_tokens_per_doc: Annotated[int, Field(ge=1)] | None = None
    """Tokens to which documents are truncated; default: no truncation."""


class PlainRerankBody(WireModel):
    """Documents (Jina) or texts (TEI) to rank."""

    query: str
    documents: Documents | None = None
    """Jina's name of `texts`."""
    texts: Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS)] | None = None
    """TEI's name of `documents`."""
    model: Name | None = None
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = True
    return_text: bool | None = False
    raw_scores: bool | None = False
    truncate: bool | None = False
    """Truncate texts to what fits beside the query."""
    truncation_direction: Literal["right", "Right"] | None = None


class CohereRerankReply(BaseModel):
    """A ranking, best first, in Cohere's format."""

    id: str
    results: list[dict[str, Any]]
    meta: dict[str, Any]

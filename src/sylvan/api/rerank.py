"""Wire models of rankings in the forms of Cohere, Jina and Text Embeddings Inference (TEI)."""

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
    """Documents to be ranked, as Cohere has it."""

    query: str
    documents: Documents
    model: Name | None = None
    top_n: Annotated[int, Field(ge=1)] | None = None
    max_tokens_per_doc: Annotated[int, Field(ge=1)] | None = None
    """Tokens after which a document is cut; not at all if not given."""


class PlainRerankBody(WireModel):
    """Documents (as Jina has it) or texts (as TEI has it) to be ranked."""

    query: str
    documents: Documents | None = None
    """Jina's form of `texts`."""
    texts: Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS)] | None = None
    """TEI's form of `documents`."""
    model: Name | None = None
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = True
    return_text: bool | None = False
    raw_scores: bool | None = False
    truncate: bool | None = False
    """Cut texts to what the model reads beside the query."""
    truncation_direction: Literal["right", "Right"] | None = None


class CohereRerankReply(BaseModel):
    """A ranking, the best first, as Cohere has it."""

    id: str
    results: list[dict[str, Any]]
    meta: dict[str, Any]

"""Bodies of `/v1/conversations`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from sylvan.api.openai.batches import MetadataKey, MetadataValue
from sylvan.api.openai.chat import MAX_MESSAGES
from sylvan.api.validation import WireModel

Metadata = Annotated[dict[MetadataKey, MetadataValue], Field(max_length=64)]


class ConversationBody(WireModel):
    """A conversation to create."""

    items: Annotated[list[dict[str, Any]], Field(max_length=MAX_MESSAGES)] | None = None
    """Its first items: messages, calls and their results."""
    metadata: Metadata | None = None


class ConversationChange(WireModel):
    """New metadata."""

    metadata: Metadata


class ItemsBody(WireModel):
    """Items to add."""

    items: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES)]


class ConversationReply(BaseModel):
    """A conversation; its items are read separately."""

    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


class ConversationDeleted(BaseModel):
    """A deleted conversation."""

    id: str
    object: Literal["conversation.deleted"]
    deleted: bool

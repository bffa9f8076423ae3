"""Bodies of Anthropic's message batches."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from sylvan.api.openai.batches import MAX_BATCH_LINES
from sylvan.api.request_fields import Name
from sylvan.api.validation import WireModel


class BatchRequest(WireModel):
    """One request of a batch."""

    custom_id: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    """ID of its result; unique within the batch."""
    params: dict[str, Any]
    """A body of `/v1/messages`."""


class MessageBatchBody(WireModel):
    """A batch of requests."""

    requests: Annotated[list[BatchRequest], Field(min_length=1, max_length=MAX_BATCH_LINES)]


class MessageBatchQuery(WireModel):
    """A page of the batches."""

    limit: Annotated[int, Field(ge=1, le=1000)] = 20
    after_id: Name | None = None
    """Return batches after this ID."""
    before_id: Name | None = None
    """Return batches before this ID."""


class MessageBatchReply(BaseModel):
    """A batch and its state."""

    id: str
    type: Literal["message_batch"]
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: dict[str, int]
    created_at: str
    expires_at: str
    ended_at: str | None
    cancel_initiated_at: str | None
    archived_at: str | None
    results_url: str | None


class MessageBatchesReply(BaseModel):
    """A page of batches."""

    data: list[MessageBatchReply]
    has_more: bool
    first_id: str | None
    last_id: str | None


class DeletedBatchReply(BaseModel):
    """A deleted batch."""

    id: str
    type: Literal["message_batch_deleted"]

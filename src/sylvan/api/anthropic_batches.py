"""Wire models of Anthropic's message batches."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from sylvan.api.openai.batches import MAX_BATCH_LINES
from sylvan.api.request_fields import Name
from sylvan.api.validation import WireModel


class BatchRequest(WireModel):
    """One request of a batch."""

    custom_id: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    """By which its result is known; unique in the batch."""
    params: dict[str, Any]
    """A body of `/v1/messages`."""


class MessageBatchBody(WireModel):
    """Requests to be answered when there is time."""

    requests: Annotated[list[BatchRequest], Field(min_length=1, max_length=MAX_BATCH_LINES)]


class MessageBatchQuery(WireModel):
    """Which part of the batches to return."""

    limit: Annotated[int, Field(ge=1, le=1000)] = 20
    after_id: Name | None = None
    """The last id of the part before."""
    before_id: Name | None = None
    """The first id of the part behind."""


class MessageBatchReply(BaseModel):
    """The state of a batch."""

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
    """A part of the batches."""

    data: list[MessageBatchReply]
    has_more: bool
    first_id: str | None
    last_id: str | None


class DeletedBatchReply(BaseModel):
    """A batch that is gone."""

    id: str
    type: Literal["message_batch_deleted"]

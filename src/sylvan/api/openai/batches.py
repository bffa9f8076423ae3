"""Bodies of `/v1/files` and `/v1/batches`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from sylvan.api.request_fields import Name
from sylvan.api.validation import WireModel

MAX_BATCH_LINES = 50_000
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")


MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]


class BatchBody(WireModel):
    """A batch to create."""

    input_file_id: Name
    """A file of purpose `batch`: one request per line."""
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
    """Route of every request."""
    completion_window: Literal["24h"]
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=64)] | None = None


class ListQuery(WireModel):
    """A page of a list."""

    limit: Annotated[int, Field(ge=1, le=10_000)] = 20
    after: Name | None = None
    """Return objects after this ID."""
    purpose: Name | None = None


class FileReply(BaseModel):
    """A stored file."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["processed"]


class ListReply(BaseModel):
    """A page of a list."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    has_more: bool
    first_id: str | None
    last_id: str | None


class DeletedReply(BaseModel):
    """A deleted object."""

    id: str
    object: str
    deleted: bool


class BatchReply(BaseModel):
    """A batch and its state."""

    id: str
    object: Literal["batch"]
    endpoint: str
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating",
        "failed",
        "in_progress",
        "finalizing",
        "completed",
        "expired",
        "cancelling",
        "cancelled",
    ]
    output_file_id: str | None
    error_file_id: str | None
    errors: dict[str, Any] | None
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: dict[str, int]
    metadata: dict[str, str] | None

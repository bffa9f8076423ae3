"""Bodies of `/v1/models`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel


class ModelCard(BaseModel):
    """One model, or one of its adapters."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None = None
    max_model_len: int | None = None


class ModelList(BaseModel):
    """All models."""

    object: Literal["list"]
    data: list[ModelCard]

"""Queries of the prefix cache routes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from sylvan.api.validation import WireModel


class TreeQuery(WireModel):
    """Query of `/cache/tree`."""

    max_nodes: Annotated[int, Field(ge=1, le=10_000)] = 1000
    """Largest number of nodes to return."""


class ExplainQuery(WireModel):
    """Query of `/cache/explain`."""

    rid: Annotated[str, Field(min_length=1, max_length=256)]
    """Request ID, one of the newest thousand."""


class CurveQuery(WireModel):
    """Query of `/cache/curve`."""

    points: Annotated[int, Field(ge=2, le=100)] = 20
    """Number of cache sizes, evenly spaced up to the actual size."""

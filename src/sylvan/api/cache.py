"""Queries about the prefix cache."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from sylvan.api.validation import WireModel


class TreeQuery(WireModel):
    """Query of `/cache/tree`."""

    max_nodes: Annotated[int, Field(ge=1, le=10_000)] = 1000
    """How many nodes to describe at most."""


class ExplainQuery(WireModel):
    """Query of `/cache/explain`."""

    rid: Annotated[str, Field(min_length=1, max_length=256)]
    """The request, among the newest thousand."""


class CurveQuery(WireModel):
    """Query of `/cache/curve`."""

    points: Annotated[int, Field(ge=2, le=100)] = 20
    """How many sizes, evenly up to that of the cache."""

"""Bodies and queries of the routes that change settings at run time."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from sylvan.api.validation import ClosedModel, WireModel


class DryRunQuery(WireModel):
    """Query of `PATCH /config`, `/config/reload` and `/config/revert`."""

    dry_run: bool = False
    """Report what would change, without changing it."""


class SettingsBody(WireModel):
    """Body of `PATCH /config`: sections and fields, as in a configuration file."""

    limits: Annotated[dict[str, Any], Field(max_length=100)] | None = None
    """Fields of `limits`."""
    server: Annotated[dict[str, Any], Field(max_length=100)] | None = None
    """Fields of `server`: keys, body size, drain time."""
    observe: Annotated[dict[str, Any], Field(max_length=100)] | None = None
    """Fields of `observe`: log level."""


class RevertBody(ClosedModel):
    """Body of `/config/revert`."""

    to: Annotated[int, Field(ge=0)]
    """Number of a journal entry: restore the state after it. 0: the state at start-up."""

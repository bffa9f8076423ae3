"""Bodies and queries of the routes that change settings of a server that runs."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from sylvan.api.validation import ClosedModel, WireModel


class DryRunQuery(WireModel):
    """Query of `PATCH /config`, `/config/reload` and `/config/revert`."""

    dry_run: bool = False
    """Say what would change, and change nothing."""


class SettingsBody(WireModel):
    """Body of `PATCH /config`: sections and fields, as in a file of settings."""

    limits: Annotated[dict[str, Any], Field(max_length=100)] | None = None
    """Fields of `limits`."""
    server: Annotated[dict[str, Any], Field(max_length=100)] | None = None
    """Fields of `server`: keys, the size of bodies, the time to drain."""
    observe: Annotated[dict[str, Any], Field(max_length=100)] | None = None
    """Fields of `observe`: the level of logs."""


class RevertBody(ClosedModel):
    """Body of `/config/revert`."""

    to: Annotated[int, Field(ge=0)]
    """Number of an entry of the journal: all is as after it. 0: as at the start."""

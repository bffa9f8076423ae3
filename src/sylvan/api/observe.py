"""Bodies and queries of the observability routes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sylvan.api.validation import ClosedModel, WireModel

Name = Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]


class TracesQuery(WireModel):
    """Query of `/trace`."""

    last: Annotated[int, Field(ge=1, le=1000)] = 50
    """Number of requests, newest first."""


class StepsQuery(WireModel):
    """Query of `/trace/steps`."""

    last: Annotated[int, Field(ge=1, le=4096)] = 1000
    """Number of steps of each scheduler, newest first."""
    format: Literal["perfetto", "json"] = "perfetto"
    """Perfetto's and Chrome's trace events, or the raw records."""


class TraceLevelQuery(WireModel):
    """Query of `/set_trace_level`."""

    level: Annotated[int, Field(ge=0, le=3)]
    """0 nothing, 1 one span per request, 2 its stages too, 3 also events."""


class LoggingBody(ClosedModel):
    """Body of `/configure_logging`; fields left out stay."""

    log_requests: bool | None = None
    """Whether requests are logged."""
    log_requests_level: Annotated[int, Field(ge=0, le=3)] | None = None
    """Level of detail."""
    log_requests_format: Literal["text", "json"] | None = None
    """Format of the lines."""
    log_level: Literal["debug", "info", "warning", "error"] | None = None
    """Log level of this process."""
    dump_requests_exclude_meta_keys: Annotated[list[str], Field(max_length=100)] | None = None
    """Keys to leave out of request log lines."""


class ProfileBody(ClosedModel):
    """Body of `/start_profile`."""

    output_dir: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """Directory on the server; default: `observe.report_dir`."""
    num_steps: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Stop after this many steps; default: at `/stop_profile`."""
    activities: Annotated[list[str], Field(max_length=8)] | None = None
    """Activities of PyTorch's profiler: CPU, GPU."""
    with_stack: bool | None = None
    """Record stacks."""
    record_shapes: bool | None = None
    """Record tensor shapes."""
    profile_id: Name | None = None
    """Name of the profile; default: the time."""
    profile_prefix: Name | None = None
    """Prefix of file names."""

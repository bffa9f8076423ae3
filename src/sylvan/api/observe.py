"""Bodies and queries of routes by which operators look at a server."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sylvan.api.validation import ClosedModel, WireModel

Name = Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]


class TracesQuery(WireModel):
    """Query of `/trace`."""

    last: Annotated[int, Field(ge=1, le=1000)] = 50
    """How many requests, the newest ones."""


class StepsQuery(WireModel):
    """Query of `/trace/steps`."""

    last: Annotated[int, Field(ge=1, le=4096)] = 1000
    """How many steps of each scheduler, the newest ones."""
    format: Literal["perfetto", "json"] = "perfetto"
    """Perfetto's and Chrome's trace events, or the records as they are."""


class TraceLevelQuery(WireModel):
    """Query of `/set_trace_level`."""

    level: Annotated[int, Field(ge=0, le=3)]
    """0 nothing, 1 a span for each request, 2 its stages as well, 3 and events."""


class LoggingBody(ClosedModel):
    """Body of `/configure_logging`; what is left out stays as it is."""

    log_requests: bool | None = None
    """Whether requests are logged."""
    log_requests_level: Annotated[int, Field(ge=0, le=3)] | None = None
    """How much of each."""
    log_requests_format: Literal["text", "json"] | None = None
    """Form of the lines."""
    log_level: Literal["debug", "info", "warning", "error"] | None = None
    """Least important messages of this process that are logged."""
    dump_requests_exclude_meta_keys: Annotated[list[str], Field(max_length=100)] | None = None
    """Keys that lines about requests leave out."""


class ProfileBody(ClosedModel):
    """Body of `/start_profile`."""

    output_dir: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """Folder of the server's machine; default: `observe.report_dir`."""
    num_steps: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Stop by itself after so many steps; default: at `/stop_profile`."""
    activities: Annotated[list[str], Field(max_length=8)] | None = None
    """Of PyTorch's profiler: CPU, GPU."""
    with_stack: bool | None = None
    """Record stacks."""
    record_shapes: bool | None = None
    """Record shapes of tensors."""
    profile_id: Name | None = None
    """Name of the profile; default: the time."""
    profile_prefix: Name | None = None
    """What names of files begin with."""

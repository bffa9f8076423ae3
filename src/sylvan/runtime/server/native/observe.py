"""Routes for tracing, logging and profiling."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.responses import Response

from sylvan.api.observe import LoggingBody, ProfileBody, StepsQuery, TraceLevelQuery, TracesQuery
from sylvan.protocol.commands import StartProfile, StopProfile
from sylvan.protocol.errors import CapacityError, RequestError, SylvanError
from sylvan.runtime.engine.hang_report import report_dir
from sylvan.runtime.server.context import Context
from sylvan.runtime.server.endpoint import Call, NotFoundError, json_response, text_response
from sylvan.runtime.server.observe.perfetto import perfetto_of
from sylvan.runtime.server.observe.traces import KEPT, RequestTrace, trace_json

logger = logging.getLogger(__name__)

PROFILE_S = 60.0
"""Seconds to wait for the profile's files."""
_POLL_S = 0.05


async def trace(call: Call[None]) -> Response:
    """Return the spans of a finished request, with its stages; a tenant sees only its own."""
    rid = call.request.path_params["rid"]
    found = call.context.observing.traces.find(rid, _owner(call))
    if found is None:
        message = f"rid: no request {rid[:100]!r} is among the last {KEPT} that are over."
        raise NotFoundError(message, param="rid")
    return json_response(_json(call.context, found))


async def traces(call: Call[None]) -> Response:
    """List the newest finished requests with their spans, latest first."""
    query: TracesQuery = call.query
    found = call.context.observing.traces.newest(query.last, _owner(call))
    return json_response({"traces": [_json(call.context, each) for each in found]})


async def trace_steps(call: Call[None]) -> Response:
    """Return the last steps of each scheduler, for https://ui.perfetto.dev or chrome://tracing."""
    query: StepsQuery = call.query
    context = call.context
    clients = context.engine.router.clients
    steps = {client.replica: client.read_steps(query.last) for client in clients}
    offset = context.wall() - context.clock()
    if query.format == "perfetto":
        return json_response(perfetto_of(steps, offset))
    rows = [
        {"dp_rank": replica, "time_offset_s": offset, "steps": msgspec.to_builtins(own)}
        for replica, own in steps.items()
    ]
    return json_response({"schedulers": rows})


async def set_trace_level(call: Call[None]) -> Response:
    """Change what is exported to the trace collector."""
    query: TraceLevelQuery = call.query
    observed = call.context.observing.traces
    if query.level and not observed.exports:
        raise RequestError("Tracing is off: start the server with --enable-trace.", param="level")
    observed.level = query.level
    return text_response(f"The trace level is {query.level}.\n")


async def configure_logging(call: Call[LoggingBody]) -> Response:
    """Change the request logging settings."""
    body, settings = call.body, call.context.observing.log.settings
    if body.log_requests is not None:
        settings.on = body.log_requests
    if body.log_requests_level is not None:
        settings.level = body.log_requests_level
    if body.log_requests_format is not None:
        settings.style = body.log_requests_format
    if body.dump_requests_exclude_meta_keys is not None:
        settings.hidden = frozenset(body.dump_requests_exclude_meta_keys)
    if body.log_level is not None:
        logging.getLogger().setLevel(body.log_level.upper())
    return json_response(
        {
            "log_requests": settings.on,
            "log_requests_level": settings.level,
            "log_requests_format": settings.style,
            "log_level": logging.getLevelName(logging.getLogger().level).lower(),
        }
    )


async def start_profile(call: Call[ProfileBody]) -> Response:
    """Start the profiler."""
    body, context = call.body, call.context
    name = body.profile_id or f"{datetime.now(UTC):%Y%m%d-%H%M%S-%f}"
    folder = body.output_dir or str(report_dir(context.settings.observe.report_dir))
    command = StartProfile(
        folder=folder,
        name=f"{body.profile_prefix}-{name}" if body.profile_prefix else name,
        activities=("CPU", "GPU") if body.activities is None else tuple(body.activities),
        with_stack=bool(body.with_stack),
        record_shapes=bool(body.record_shapes),
    )
    await _ask(context, command)
    if body.num_steps is not None:
        context.detached.begin(_stop_after(context, body.num_steps))
    return text_response(f"Recording profile {command.name} into {folder}.\n")


async def stop_profile(call: Call[None]) -> Response:
    """Stop the profiler, and write its files."""
    body = await _ask(call.context, StopProfile())
    replicas: list[dict[str, Any]] = body.get("replicas", [body])
    files = [file for replica in replicas for file in replica.get("files", [])]
    return text_response("\n".join(["Profile written:", *files]) + "\n")


async def _stop_after(context: Context, steps: int) -> None:
    """Stop a profile after some more steps, or when the schedulers were lost."""
    last = context.engine.router.clients[0].read_steps(1)
    until = (last[-1].number if last else 0) + steps
    while context.engine.alive():
        newest = context.engine.router.clients[0].read_steps(1)
        if newest and newest[-1].number >= until and newest[-1].completed_s:
            break
        await asyncio.sleep(_POLL_S)
    try:
        await _ask(context, StopProfile())
    except SylvanError as error:  # already stopped, or the disk is full
        logger.warning("the profile was not written: %s", error)


async def _ask(context: Context, command: StartProfile | StopProfile) -> dict[str, Any]:
    reply = await context.engine.control(command, timeout_s=PROFILE_S)
    if reply.ok:
        return reply.body or {}
    if reply.status == 503:
        raise CapacityError(reply.message)
    raise RequestError(reply.message, status=reply.status)


def _json(context: Context, found: RequestTrace) -> dict[str, Any]:
    return trace_json(found, context.wall(), context.clock)


def _owner(call: Call[Any]) -> str | None:
    """Return the tenant whose requests the caller may see; None: all."""
    return call.tenant.name or None

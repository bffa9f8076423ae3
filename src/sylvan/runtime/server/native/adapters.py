"""Routes that load and unload LoRA adapters."""

from __future__ import annotations

import re
from collections.abc import Awaitable
from pathlib import Path

from starlette.responses import Response

from sylvan.api.adapters import (
    LoadAdapterBody,
    SentAdapterBody,
    UnloadAdapterBody,
    check_sums,
    sent_file,
)
from sylvan.api.weights import SharedFile
from sylvan.protocol.errors import RequestError
from sylvan.runtime.server.context import Context
from sylvan.runtime.server.endpoint import Call, json_response
from sylvan.utils.threads import call_in_thread

_SHARED = Path("/dev/shm")
_SHARED_NAME = re.compile(r"/?([A-Za-z0-9][A-Za-z0-9_.\-]{0,200})")


async def load(call: Call[LoadAdapterBody]) -> Response:
    """Load an adapter from a directory."""
    body, adapters = call.body, call.context.engine.adapters
    work = adapters.load(body.lora_name, body.lora_path, pinned=body.pinned)
    return await _answer(call.context, work)


async def load_sent(call: Call[SentAdapterBody]) -> Response:
    """Load an adapter whose tensors are in the request."""
    body, adapters = call.body, call.context.engine.adapters
    weights = sent_file(body)
    if isinstance(weights, SharedFile):
        weights = await call_in_thread(_read, weights)
    if body.expected_checksums:
        await call_in_thread(check_sums, weights, body.expected_checksums)
    work = adapters.load_tensors(body.lora_name, body.config_dict, weights, pinned=body.pinned)
    return await _answer(call.context, work)


async def unload(call: Call[UnloadAdapterBody]) -> Response:
    """Unload an adapter."""
    body, adapters = call.body, call.context.engine.adapters
    work = adapters.unload(body.lora_name, abort=body.abort_requests)
    return await _answer(call.context, work)


async def _answer(context: Context, work: Awaitable[object]) -> Response:
    status, message = 200, ""
    try:
        await work
    except RequestError as error:
        status, message = error.status, str(error)
    served = {info.name: info.path for info in context.engine.adapters.served()}
    content = {"success": not message, "error_message": message, "loaded_adapters": served}
    return json_response(content, status=status)


def _read(file: SharedFile) -> bytes:
    """Read a file in shared memory.

    Raises:
        RequestError: There is none with that name and length.
    """
    found = _SHARED_NAME.fullmatch(file.shared_memory)
    try:
        with (_SHARED / (found[1] if found else "")).open("rb") as memory:
            data = memory.read(file.num_bytes)
    except OSError:
        data = b""
    if len(data) < file.num_bytes:
        raise RequestError(
            f"serialized_named_tensors: there are no {file.num_bytes} bytes of shared memory "
            f"called {file.shared_memory!r}",
            param="serialized_named_tensors",
        )
    return data

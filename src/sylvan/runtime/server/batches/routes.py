"""`/v1/files` and `/v1/batches`."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from sylvan.api.multipart import parse_form
from sylvan.api.openai.batches import ENDPOINTS, BatchBody, ListQuery
from sylvan.protocol.errors import RequestError
from sylvan.runtime.server.batches.lines import read_lines
from sylvan.runtime.server.endpoint import Call, NotFoundError, json_response
from sylvan.runtime.server.stores.batch_worker import request_counts
from sylvan.runtime.server.stores.batches import UNFINISHED, BatchStore, StoredFile
from sylvan.utils.threads import call_in_thread

WINDOW_S = 24 * 3600
_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


async def upload(call: Call[None]) -> Response:
    """Store a file."""
    request, context = call.request, call.context
    body = await context.bodies.read(request)
    kind = request.headers.get("content-type", "")
    form = await context.bodies.decoded(body, lambda body: parse_form(kind, body))
    part, purpose = form.get("file"), form.get("purpose")
    if part is None or part.filename is None:
        raise RequestError("file must be given.", param="file")
    if purpose is None:
        raise RequestError("purpose must be given.", param="purpose")
    store = await swept_store(call)
    await check_room(call, store, len(part.content), "file")
    file = StoredFile(
        f"file-{secrets.token_hex(12)}",
        call.tenant.name,
        part.filename[:255],
        purpose.content.decode("utf-8", "replace")[:64],
        int(context.wall()),
        len(part.content),
    )
    await call_in_thread(store.files.add, file, part.content)
    return json_response(_file_reply(file))


async def list_files(call: Call[None]) -> Response:
    """List the files, newest first."""
    query: ListQuery = call.query
    store = await swept_store(call)
    files = await call_in_thread(store.files.list, call.tenant.name, query.purpose)
    return json_response(_page([_file_reply(file) for file in files], query))


async def retrieve_file(call: Call[None]) -> Response:
    """Describe a file."""
    return json_response(_file_reply(await _file(call)))


async def file_content(call: Call[None]) -> Response:
    """Return the content of a file."""
    file = await _file(call)
    content = await call_in_thread(call.context.batches.store.files.content, file.id)
    headers = {"x-content-type-options": "nosniff", "content-disposition": "attachment"}
    return Response(content, 200, headers, "application/octet-stream")


async def delete_file(call: Call[None]) -> Response:
    """Delete a file."""
    file = await _file(call)
    await call_in_thread(call.context.batches.store.files.delete, file.id)
    return json_response({"id": file.id, "object": "file", "deleted": True})


async def create(call: Call[BatchBody]) -> Response:
    """Create a batch from a file of requests."""
    body, tenant, store = call.body, call.tenant.name, await swept_store(call)
    file = await call_in_thread(store.files.get, body.input_file_id, tenant)
    if file is None:
        message = f"There is no file {body.input_file_id[:80]!r}."
        raise RequestError(message, param="input_file_id")
    await check_room(call, store, file.num_bytes, "input_file_id")
    content = await call_in_thread(store.files.content, file.id)
    items, errors = await call_in_thread(read_lines, content, body.endpoint)
    now = int(call.context.wall())
    status = "failed" if errors else "in_progress"
    state: dict[str, Any] = {
        "id": f"batch_{secrets.token_hex(12)}",
        "object": "batch",
        "endpoint": body.endpoint,
        "input_file_id": file.id,
        "completion_window": body.completion_window,
        "status": status,
        "output_file_id": None,
        "error_file_id": None,
        "errors": {"object": "list", "data": errors} if errors else None,
        "created_at": now,
        "expires_at": now + WINDOW_S,
        **{f"{name}_at": None for name in _TIMES},
        "metadata": body.metadata,
    }
    state[f"{status}_at"] = now
    await call_in_thread(store.add_batch, tenant, state, () if errors else items)
    call.context.batches.worker.wake()
    return json_response(await _batch_reply(store, state))


async def list_batches(call: Call[None]) -> Response:
    """List the batches, newest first."""
    store = await swept_store(call)
    found = await call_in_thread(store.batches, call.tenant.name)
    page = _page([state for state in found if state["endpoint"] in ENDPOINTS], call.query)
    page["data"] = [await _batch_reply(store, state) for state in page["data"]]
    return json_response(page)


async def retrieve(call: Call[None]) -> Response:
    """Return the state of a batch."""
    state = await _batch(call)
    return json_response(await _batch_reply(call.context.batches.store, state))


async def cancel(call: Call[None]) -> Response:
    """Cancel a batch; finished results stay readable."""
    state = await _batch(call)
    if state["status"] == "in_progress":
        state.update({"status": "cancelling", "cancelling_at": int(call.context.wall())})
        batches = call.context.batches
        await call_in_thread(batches.store.save_batch, call.tenant.name, state)
        batches.worker.cancel(state["id"])
        batches.worker.wake()
    return json_response(await _batch_reply(call.context.batches.store, state))


async def delete(call: Call[None]) -> Response:
    """Delete an ended batch; its files stay."""
    state = await _batch(call)
    if state["status"] in UNFINISHED:
        message = f"batch_id: {state['id']} has not ended; cancel it first."
        raise RequestError(message, param="batch_id", status=409)
    await call_in_thread(call.context.batches.store.delete_batch, state["id"])
    return json_response({"id": state["id"], "object": "batch", "deleted": True})


async def swept_store(call: Call[Any]) -> BatchStore:
    """Return the store after removing expired objects."""
    context = call.context
    before = int(context.wall() - context.settings.limits.retention_s)
    await call_in_thread(context.batches.store.expire, before)
    return context.batches.store


async def check_room(call: Call[Any], store: BatchStore, num_bytes: int, field: str) -> None:
    """Reject an upload that exceeds the tenant's storage limit.

    Raises:
        RequestError: The limit is exceeded (413); the message names it.
    """
    limit = call.context.settings.limits.stored_bytes
    used = await call_in_thread(store.bytes_of, call.tenant.name)
    if used + num_bytes > limit:
        message = (
            f"{field}: {num_bytes} bytes more than the {used} of your files and batches are more "
            f"than limits.stored_bytes={limit}; delete some first."
        )
        raise RequestError(message, param=field, status=413, setting="limits.stored_bytes")


async def _file(call: Call[Any]) -> StoredFile:
    name = call.request.path_params["file_id"]
    store = await swept_store(call)
    found = await call_in_thread(store.files.get, name, call.tenant.name)
    if found is None:
        raise NotFoundError(f"There is no file {name[:80]!r}.", code="file_not_found")
    return found


async def _batch(call: Call[Any]) -> dict[str, Any]:
    name = call.request.path_params["batch_id"]
    store = await swept_store(call)
    found = await call_in_thread(store.batch, name, call.tenant.name)
    if found is None or found["endpoint"] not in ENDPOINTS:
        raise NotFoundError(f"There is no batch {name[:80]!r}.", code="batch_not_found")
    return found


def _file_reply(file: StoredFile) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": file.created_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
    }


async def _batch_reply(store: BatchStore, state: dict[str, Any]) -> dict[str, Any]:
    if "request_counts" in state:
        return state
    counts = await call_in_thread(store.counts, state["id"])
    return {**state, "request_counts": request_counts(*counts)}


def _page(replies: Sequence[dict[str, Any]], query: ListQuery) -> dict[str, Any]:
    start = 0
    if query.after is not None:
        ids = [reply["id"] for reply in replies]
        if query.after not in ids:
            raise RequestError("after: no item of the list has this ID.", param="after")
        start = ids.index(query.after) + 1
    data = replies[start : start + query.limit]
    return {
        "object": "list",
        "data": data,
        "has_more": start + len(data) < len(replies),
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
    }

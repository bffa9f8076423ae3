"""`/v1/messages/batches`, on top of the store and worker of OpenAI's batches."""

from __future__ import annotations

import json
import secrets
from datetime import UTC, datetime
from typing import Any

from starlette.responses import Response

from sylvan.api.anthropic_batches import MessageBatchBody, MessageBatchQuery
from sylvan.protocol.errors import RequestError
from sylvan.runtime.server.batches.routes import WINDOW_S, check_room, swept_store
from sylvan.runtime.server.endpoint import Call, NotFoundError, json_response
from sylvan.runtime.server.stores.batch_worker import request_counts
from sylvan.runtime.server.stores.batches import UNFINISHED, BatchStore, Item
from sylvan.utils.threads import call_in_thread

ENDPOINT = "/v1/messages"
_PREFIX = "msgbatch_"
_UNANSWERED = {"batch_expired": "expired", "batch_cancelled": "canceled"}

State = dict[str, Any]


async def create(call: Call[MessageBatchBody]) -> Response:
    """Create a batch of requests."""
    items = _items(call.body)
    store = await swept_store(call)
    await check_room(call, store, sum(len(item.body) for item in items), "requests")
    now = int(call.context.wall())
    state: State = {
        "id": f"{_PREFIX}{secrets.token_hex(12)}",
        "endpoint": ENDPOINT,
        "status": "in_progress",
        "created_at": now,
        "expires_at": now + WINDOW_S,
        "lists_cancelled": True,
    }
    await call_in_thread(store.add_batch, call.tenant.name, state, items)
    call.context.batches.worker.wake()
    return json_response(await _reply(store, state))


async def list_batches(call: Call[None]) -> Response:
    """List the batches, newest first."""
    query: MessageBatchQuery = call.query
    store = await swept_store(call)
    found = await call_in_thread(store.batches, call.tenant.name)
    states = [state for state in found if state["endpoint"] == ENDPOINT]
    start, stop = 0, len(states)
    if query.after_id is not None:
        start = _place(states, query.after_id, "after_id") + 1
    if query.before_id is not None:
        stop = _place(states, query.before_id, "before_id")
        start = max(start, stop - query.limit)
    part = states[start : min(stop, start + query.limit)]
    more = start > 0 if query.before_id is not None else start + len(part) < stop
    return json_response(
        {
            "data": [await _reply(store, state) for state in part],
            "has_more": more,
            "first_id": part[0]["id"] if part else None,
            "last_id": part[-1]["id"] if part else None,
        }
    )


async def retrieve(call: Call[None]) -> Response:
    """Return the state of a batch."""
    state = await _batch(call)
    return json_response(await _reply(call.context.batches.store, state))


async def cancel(call: Call[None]) -> Response:
    """Cancel a batch; finished results stay readable."""
    state, batches = await _batch(call), call.context.batches
    if state["status"] == "in_progress":
        state.update({"status": "cancelling", "cancelling_at": int(call.context.wall())})
        await call_in_thread(batches.store.save_batch, call.tenant.name, state)
        batches.worker.cancel(state["id"])
        batches.worker.wake()
    return json_response(await _reply(batches.store, state))


async def delete(call: Call[None]) -> Response:
    """Delete an ended batch and its results."""
    state, store = await _batch(call), call.context.batches.store
    if state["status"] in UNFINISHED:
        message = f"batch_id: {state['id']} has not ended; cancel it first."
        raise RequestError(message, param="batch_id", status=409)
    for name in _result_files(state):
        await call_in_thread(store.files.delete, name)
    await call_in_thread(store.delete_batch, state["id"])
    return json_response({"id": state["id"], "type": "message_batch_deleted"})


async def results(call: Call[None]) -> Response:
    """Return the results, one request per line."""
    state, store = await _batch(call), call.context.batches.store
    if state["status"] in UNFINISHED:
        raise RequestError(f"batch_id: {state['id']} has not ended yet.", param="batch_id")
    lines: list[bytes] = []
    for name in _result_files(state):
        content = await call_in_thread(store.files.content, name)
        lines += [_result(json.loads(line)) for line in content.splitlines()]
    return Response(b"".join(lines), 200, None, "application/x-jsonl")


def _items(body: MessageBatchBody) -> list[Item]:
    items: list[Item] = []
    seen: set[str] = set()
    for i, request in enumerate(body.requests):
        path = f"requests[{i}]"
        if request.custom_id in seen:
            message = f"{path}.custom_id: {request.custom_id!r} is not unique."
            raise RequestError(message, param=f"{path}.custom_id")
        if request.params.get("stream"):
            message = f"{path}.params.stream must not be true."
            raise RequestError(message, param=f"{path}.params.stream")
        seen.add(request.custom_id)
        items.append(Item(i, request.custom_id, json.dumps(request.params)))
    return items


def _place(states: list[State], name: str, param: str) -> int:
    ids = [state["id"] for state in states]
    if name not in ids:
        raise RequestError(f"{param}: no item of the list has this ID.", param=param)
    return ids.index(name)


async def _batch(call: Call[Any]) -> State:
    name = call.request.path_params["batch_id"]
    store = await swept_store(call)
    found = await call_in_thread(store.batch, name, call.tenant.name)
    if found is None or found["endpoint"] != ENDPOINT:
        raise NotFoundError(f"There is no batch {name[:80]!r}.")
    return found


def _result_files(state: State) -> list[str]:
    names = (state.get(kind) for kind in ("output_file_id", "error_file_id"))
    return [name for name in names if name]


async def _reply(store: BatchStore, state: State) -> State:
    ended = state["status"] not in UNFINISHED
    counts = state.get("request_counts")
    if counts is None:
        counts = request_counts(*await call_in_thread(store.counts, state["id"]))
    left = counts["total"] - counts["completed"] - counts["failed"]
    cancelled = state["status"] == "cancelled"
    at = state.get("finalizing_at")
    return {
        "id": state["id"],
        "type": "message_batch",
        "processing_status": "ended"
        if ended
        else "canceling"
        if state["status"] == "cancelling"
        else "in_progress",
        "request_counts": {
            "processing": 0 if ended else left,
            "succeeded": counts["completed"],
            "errored": counts["failed"] + (left if state["status"] == "failed" else 0),
            "canceled": left if cancelled else 0,
            "expired": left if state["status"] == "expired" else 0,
        },
        "created_at": _time(state["created_at"]),
        "expires_at": _time(state["expires_at"]),
        "ended_at": _time(at) if ended and at is not None else None,
        "cancel_initiated_at": _time(state["cancelling_at"]) if "cancelling_at" in state else None,
        "archived_at": None,
        "results_url": f"{ENDPOINT}/batches/{state['id']}/results" if ended else None,
    }


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _result(line: dict[str, Any]) -> bytes:
    response, error = line["response"], line["error"]
    result: dict[str, Any]
    if response is not None and response["status_code"] < 400:
        result = {"type": "succeeded", "message": response["body"]}
    elif response is not None:
        result = {"type": "errored", "error": response["body"]}
    elif error["code"] in _UNANSWERED:
        result = {"type": _UNANSWERED[error["code"]]}
    else:
        fault = {"type": "api_error", "message": error["message"]}
        result = {"type": "errored", "error": {"type": "error", "error": fault}}
    return json.dumps({"custom_id": line["custom_id"], "result": result}).encode() + b"\n"

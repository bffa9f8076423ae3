"""`/v1/conversations`: stored conversations that later responses can continue."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from starlette.responses import Response

from sylvan.api.openai.conversations import ConversationBody, ConversationChange, ItemsBody
from sylvan.api.openai.items import conversation_item, page
from sylvan.api.openai.responses import chat_messages
from sylvan.protocol.errors import RequestError
from sylvan.runtime.server.endpoint import Call, NotFoundError, json_response
from sylvan.runtime.server.stores.responses import StoredResponse

Item = dict[str, Any]


async def create(call: Call[ConversationBody]) -> Response:
    """Create a conversation."""
    body, store = call.body, call.context.conversations
    if not store.enabled:
        message = "Conversations are not kept here (server.response_store_size is 0)."
        raise RequestError(message)
    reply = {
        "id": f"conv_{call.context.ids(16)}",
        "object": "conversation",
        "created_at": int(call.context.wall()),
        "metadata": body.metadata or {},
    }
    store.put(call.tenant.name, reply, _checked(call, body.items or ()))
    return json_response(reply)


async def retrieve(call: Call[None]) -> Response:
    """Return a conversation."""
    return json_response(_found(call).reply)


async def change(call: Call[ConversationChange]) -> Response:
    """Replace the metadata of a conversation."""
    found = _found(call)
    call.context.conversations.change(found, {"metadata": call.body.metadata})
    return json_response(found.reply)


async def delete(call: Call[None]) -> Response:
    """Delete a conversation; its responses stay."""
    found = _found(call)
    call.context.conversations.drop(found)
    reply = {"id": found.name, "object": "conversation.deleted", "deleted": True}
    return json_response(reply)


async def list_items(call: Call[None]) -> Response:
    """List the items of a conversation, newest first."""
    return json_response(page(_found(call).items, call.query))


async def add_items(call: Call[ItemsBody]) -> Response:
    """Add items to a conversation."""
    found = _found(call)
    added = _checked(call, call.body.items)
    call.context.conversations.change_items(found, [*found.items, *added])
    return json_response(
        {
            "object": "list",
            "data": added,
            "first_id": added[0]["id"],
            "last_id": added[-1]["id"],
            "has_more": False,
        }
    )


async def retrieve_item(call: Call[None]) -> Response:
    """Return an item of a conversation."""
    return json_response(_item(call, _found(call)))


async def delete_item(call: Call[None]) -> Response:
    """Delete an item; answer with the conversation."""
    found = _found(call)
    gone = _item(call, found)
    left = [item for item in found.items if item["id"] != gone["id"]]
    call.context.conversations.change_items(found, left)
    return json_response(found.reply)


def find(call: Call[Any], name: str, param: str) -> StoredResponse:
    """Return the tenant's conversation with an ID.

    Raises:
        RequestError: The ID is malformed, or the tenant has no such conversation.
    """
    if not name.startswith("conv_"):
        message = f"{param}: {name[:80]!r} is not an id of a conversation (conv_...)."
        raise RequestError(message, param=param)
    found = call.context.conversations.get(name, call.tenant.name)
    if found is None:
        message = f"{param}: there is no conversation {name[:80]!r}."
        raise NotFoundError(message, param=param, code="conversation_not_found")
    return found


def extend(call: Call[Any], name: str, items: Iterable[Item]) -> None:
    """Append a response's input and output; do nothing if the conversation was deleted."""
    found = call.context.conversations.get(name, call.tenant.name)
    if found is not None:
        added = [conversation_item(item, call.context.ids(16)) for item in items]
        call.context.conversations.change_items(found, [*found.items, *added])


def _found(call: Call[Any]) -> StoredResponse:
    return find(call, call.request.path_params["conversation_id"], "conversation_id")


def _item(call: Call[Any], found: StoredResponse) -> Item:
    name = call.request.path_params["item_id"]
    for item in found.items:
        if item["id"] == name:
            return item
    message = f"item_id: there is no item {name[:80]!r}."
    raise NotFoundError(message, param="item_id", code="item_not_found")


def _checked(call: Call[Any], items: Iterable[Item]) -> list[Item]:
    """Return the items in stored form.

    Raises:
        RequestError: An item cannot be part of a conversation.
    """
    given = list(items)
    try:
        chat_messages(given, None)
    except RequestError as error:
        field = (error.param or "").replace("input", "items", 1)
        message = str(error).replace("input", "items", 1)
        raise RequestError(message, param=field) from error
    return [conversation_item(item, call.context.ids(16)) for item in given]

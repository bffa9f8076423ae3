"""`/v1/responses/{id}` and `/v1/conversations`: reads and changes the stored history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qsl

import orjson

from sylvan.api.errors import Family
from sylvan.api.openai.conversations import ConversationBody, ConversationChange, ItemsBody
from sylvan.api.openai.items import conversation_item, input_item, page
from sylvan.api.openai.responses import InputItemsQuery
from sylvan.api.validation import parse
from sylvan.gateway.control.api import Handler, OwnRoute, Params
from sylvan.gateway.http.caller import Caller
from sylvan.gateway.openai.history.background import Background
from sylvan.gateway.openai.history.owners import Owners
from sylvan.gateway.openai.history.store import HistoryStore, Item, StoredItem
from sylvan.gateway.openai.history.turn import checked_items, find, new_id
from sylvan.protocol.errors import RequestError
from sylvan.utils.clock import Clock

_RESPONSE = "/v1/responses/{response_id}"
_CONVERSATION = "/v1/conversations/{conversation_id}"


class HistoryRoutes:
    """Routes of the stored history.

    Args:
        store: The stored objects.
        background: Responses that are still generated.
        owners: Who owns what.
        max_body_bytes: Limit of bodies.
        wall: Wall clock, in seconds since the Unix epoch.
    """

    def __init__(
        self,
        store: HistoryStore,
        background: Background,
        owners: Owners,
        max_body_bytes: int,
        wall: Clock,
    ) -> None:
        self._store = store
        self._background = background
        self._owners = owners
        self._max_body_bytes = max_body_bytes
        self._wall = wall

    @property
    def routes(self) -> tuple[OwnRoute, ...]:
        """Return the routes."""
        items = _CONVERSATION + "/items"
        table: Sequence[tuple[str, str, Handler]] = (
            (_RESPONSE, "GET", self.response),
            (_RESPONSE, "DELETE", self.delete_response),
            (_RESPONSE + "/cancel", "POST", self.cancel),
            (_RESPONSE + "/input_items", "GET", self.input_items),
            ("/v1/conversations", "POST", self.create),
            (_CONVERSATION, "GET", self.conversation),
            (_CONVERSATION, "POST", self.update),
            (_CONVERSATION, "DELETE", self.delete_conversation),
            (items, "GET", self.list_items),
            (items, "POST", self.add_items),
            (items + "/{item_id}", "GET", self.item),
            (items + "/{item_id}", "DELETE", self.delete_item),
        )
        return tuple(
            OwnRoute(path=path, handler=handler, methods=(method,), family=Family.RESPONSES)
            for path, method, handler in table
        )

    async def response(self, caller: Caller, params: Params) -> None:
        """Return a stored response."""
        if dict(parse_qsl(caller.query)).get("stream") == "true":
            message = "stream: the events of a response are not kept."
            raise RequestError(message, param="stream")
        await caller.reply_json((await self._response(caller, params)).reply)

    async def delete_response(self, caller: Caller, params: Params) -> None:
        """Delete a response."""
        name = (await self._response(caller, params)).reply["id"]
        owner = self._owners.of(caller)
        await self._background.cancel(owner, name)
        await self._store.drop("response", owner, name)
        await caller.reply_json({"id": name, "object": "response", "deleted": True})

    async def cancel(self, caller: Caller, params: Params) -> None:
        """Cancel a background response."""
        found = (await self._response(caller, params)).reply
        owner = self._owners.of(caller)
        await self._store.replace_unfinished(owner, {**found, "status": "cancelled"})
        await self._background.cancel(owner, found["id"])
        await caller.reply_json((await self._response(caller, params)).reply)

    async def input_items(self, caller: Caller, params: Params) -> None:
        """List the items that led to a response, newest first."""
        found, query = await self._response(caller, params), _page_query(caller)
        name = found.reply["id"]
        items = [input_item(i, item, name) for i, item in enumerate(found.items)]
        await caller.reply_json(page(items, query))

    async def create(self, caller: Caller, params: Params) -> None:
        """Create a conversation."""
        body = parse(ConversationBody, await self._body(caller))
        items = _named(checked_items(body.items or [], "items"))
        reply: Item = {
            "id": new_id("conv_"),
            "object": "conversation",
            "created_at": int(self._wall()),
            "metadata": body.metadata or {},
        }
        await self._store.put("conversation", self._owners.of(caller), reply, items)
        await caller.reply_json(reply)

    async def conversation(self, caller: Caller, params: Params) -> None:
        """Return a conversation."""
        await caller.reply_json((await self._conversation(caller, params)).reply)

    async def update(self, caller: Caller, params: Params) -> None:
        """Replace the metadata of a conversation."""
        body = parse(ConversationChange, await self._body(caller))
        name = params["conversation_id"]
        changes = {"metadata": body.metadata}
        found = await self._store.describe(self._owners.of(caller), name, changes)
        await caller.reply_json(_there(found, name).reply)

    async def delete_conversation(self, caller: Caller, params: Params) -> None:
        """Delete a conversation; its responses stay."""
        name = (await self._conversation(caller, params)).reply["id"]
        await self._store.drop("conversation", self._owners.of(caller), name)
        reply = {"id": name, "object": "conversation.deleted", "deleted": True}
        await caller.reply_json(reply)

    async def list_items(self, caller: Caller, params: Params) -> None:
        """List the items of a conversation, newest first."""
        found, query = await self._conversation(caller, params), _page_query(caller)
        await caller.reply_json(page(found.items, query))

    async def add_items(self, caller: Caller, params: Params) -> None:
        """Add items to a conversation."""
        body = parse(ItemsBody, await self._body(caller))
        added = _named(checked_items(body.items, "items"))
        name = params["conversation_id"]
        owner = self._owners.of(caller)
        found = await self._store.rewrite(owner, name, lambda items: [*items, *added])
        _there(found, name)
        await caller.reply_json(
            {
                "object": "list",
                "data": added,
                "first_id": added[0]["id"],
                "last_id": added[-1]["id"],
                "has_more": False,
            }
        )

    async def item(self, caller: Caller, params: Params) -> None:
        """Return an item of a conversation."""
        found = await self._conversation(caller, params)
        await caller.reply_json(_item(found.items, params["item_id"]))

    async def delete_item(self, caller: Caller, params: Params) -> None:
        """Delete an item; answer with the conversation."""
        name, item = params["conversation_id"], params["item_id"]

        def without(items: list[Item]) -> list[Item]:
            gone = _item(items, item)
            return [one for one in items if one is not gone]

        found = await self._store.rewrite(self._owners.of(caller), name, without)
        await caller.reply_json(_there(found, name).reply)

    async def _response(self, caller: Caller, params: Params) -> StoredItem:
        owner, name = self._owners.of(caller), params["response_id"]
        return await find(self._store, "response", owner, name, "response_id")

    async def _conversation(self, caller: Caller, params: Params) -> StoredItem:
        owner, name = self._owners.of(caller), params["conversation_id"]
        return await find(self._store, "conversation", owner, name, "conversation_id")

    async def _body(self, caller: Caller) -> Any:
        body = await caller.body(self._max_body_bytes)
        try:
            return orjson.loads(body or b"{}")
        except orjson.JSONDecodeError as error:
            raise RequestError(f"The body is not valid JSON: {error}.") from error


def _there(found: StoredItem | None, name: str) -> StoredItem:
    if found is None:
        message = f"conversation_id: there is no conversation {name[:80]!r} in the history."
        code = "conversation_not_found"
        raise RequestError(message, param="conversation_id", status=404, code=code)
    return found


def _item(items: Sequence[Item], name: str) -> Item:
    for item in items:
        if item["id"] == name:
            return item
    message = f"item_id: there is no item {name[:80]!r}."
    raise RequestError(message, param="item_id", status=404, code="item_not_found")


def _named(items: Sequence[Item]) -> list[Item]:
    return [conversation_item(item, new_id("")) for item in items]


def _page_query(caller: Caller) -> InputItemsQuery:
    """Read which page is requested.

    Raises:
        RequestError: A parameter is invalid; the message names it.
    """
    given: dict[str, Any] = dict(parse_qsl(caller.query))
    limit = given.get("limit")
    if limit is not None and limit.isdecimal() and len(limit) < 9:
        given["limit"] = int(limit)
    return parse(InputItemsQuery, given)

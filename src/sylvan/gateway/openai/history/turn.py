"""One response and its history: the items before it, and the stored record."""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass, replace
from typing import Any, cast

import orjson

from sylvan.api.openai.items import conversation_item
from sylvan.gateway.http.parsed_body import ParsedBody
from sylvan.gateway.openai.history.store import HistoryStore, Item, Kind, StoredItem
from sylvan.protocol.errors import CapacityError, RequestError

log = logging.getLogger(__name__)

_ENDED = ("completed", "incomplete")


def new_id(prefix: str) -> str:
    """Make an unguessable ID."""
    return prefix + secrets.token_hex(24)


async def find(store: HistoryStore, kind: Kind, owner: str, name: str, param: str) -> StoredItem:
    """Return the owner's object with this ID.

    Raises:
        RequestError: There is none (404).
        CapacityError: The history cannot be read now.
    """
    found = await store.get(kind, owner, name)
    if found is None:
        message = f"{param}: there is no {kind} {name[:80]!r} in the history of this gateway."
        raise RequestError(message, param=param, status=404, code=f"{kind}_not_found")
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTurn:
    """A response, and what is stored with it.

    Attributes:
        owner: Owner of the response.
        parsed: The request with its whole history, for an upstream.
        items: The whole input.
        fresh: The input items of this request.
        previous: ID of the response that it continues.
        conversation: ID of its conversation.
        keeps: Whether to store it.
        background: ID by which the client polls it; None: the client waits for it.
    """

    store: HistoryStore
    owner: str
    parsed: ParsedBody
    items: list[Item]
    fresh: list[Item]
    previous: str | None = None
    conversation: str | None = None
    keeps: bool = True
    background: str | None = None

    @classmethod
    async def begin(cls, store: HistoryStore, owner: str, parsed: ParsedBody) -> StoredTurn:
        """Load what a request continues.

        Raises:
            RequestError: The request is malformed, or continues something that does not exist; the
                message names the field.
            CapacityError: The history cannot be read now.
        """
        fields = parsed.fields
        fresh = _input_items(fields.get("input"))
        previous = _name(fields, "previous_response_id")
        conversation = _conversation_name(fields)
        background = _flag(fields, "background", default=False)
        keeps = _flag(fields, "store", default=True)
        if previous is not None and conversation is not None:
            message = "conversation: it excludes previous_response_id."
            raise RequestError(message, param="conversation")
        if background and not keeps:
            raise RequestError("background: true needs store: true.", param="background")
        if background and parsed.stream:
            message = "stream cannot be combined with background: read the response by its id."
            raise RequestError(message, param="stream")
        earlier: list[Item] = []
        if previous is not None:
            kept = await find(store, "response", owner, previous, "previous_response_id")
            earlier = [*kept.items, *_output(kept.reply)]
        if conversation is not None:
            earlier = (await find(store, "conversation", owner, conversation, "conversation")).items
        items = [*earlier, *fresh]
        outgoing = parsed
        if previous is not None or conversation is not None or background:
            dropped = ("previous_response_id", "conversation", "background")
            changed = {name: value for name, value in fields.items() if name not in dropped}
            changed["input"] = [item for item in items if _is_replayable(item)]
            outgoing = replace(parsed, raw=orjson.dumps(changed), fields=changed)
        return cls(
            store=store,
            owner=owner,
            parsed=outgoing,
            items=items,
            fresh=fresh,
            previous=previous,
            conversation=conversation,
            keeps=keeps,
            background=new_id("resp_") if background else None,
        )

    def shown(self, reply: Item) -> Item:
        """Return an upstream's response under the gateway's ID."""
        changed: Item = {**reply, "previous_response_id": self.previous, "store": self.keeps}
        if self.conversation is not None:
            changed["conversation"] = {"id": self.conversation}
        if self.background is not None:
            changed |= {"id": self.background, "background": True}
        return changed

    async def keep(self, reply: Item) -> Item:
        """Store a finished response; return it as clients see it.

        If the store is full or broken, the client still gets the response: its `store` field tells
        whether it was stored.
        """
        made = self.shown(reply)
        try:
            if self.conversation is not None and made.get("status") in _ENDED:
                await self._add_to_conversation(self.conversation, _output(made))
            if self.background is not None:
                await self.store.replace_unfinished(self.owner, made)
            elif self.keeps:
                await self.store.put("response", self.owner, made, self.items)
        except CapacityError as error:
            log.warning("the response %s was not kept: %s", made.get("id"), error)
            made["store"] = False
        return made

    async def _add_to_conversation(self, name: str, output: list[Item]) -> None:
        added = [conversation_item(item, new_id("")) for item in (*self.fresh, *output)]
        await self.store.rewrite(self.owner, name, lambda items: [*items, *added])


def is_response(value: object) -> bool:
    """Whether a decoded answer is a response."""
    if not isinstance(value, dict):
        return False
    reply = cast("Item", value)
    return isinstance(reply.get("id"), str) and isinstance(reply.get("output"), list)


def checked_items(given: object, param: str) -> list[Item]:
    """Return the items that can be stored; the upstream validates what a model accepts.

    Raises:
        RequestError: An item is invalid; the message names it.
    """
    if not isinstance(given, list):
        raise RequestError(f"{param} must be a list of items.", param=param)
    items = cast("list[Any]", given)
    for i, item in enumerate(items):
        named: list[object] = (
            [cast("Item", item).get(name) for name in ("type", "role")]
            if isinstance(item, dict)
            else []
        )
        if not any(isinstance(name, str) for name in named):
            path = f"{param}[{i}]"
            raise RequestError(f"{path} must be an object with a type or a role.", param=path)
    return items


def _input_items(given: object) -> list[Item]:
    if given is None or given in ("", []):
        raise RequestError("input must not be empty.", param="input")
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    if not isinstance(given, list):
        raise RequestError("input must be a string or a list of items.", param="input")
    return checked_items(cast("object", given), "input")


def _output(reply: Item) -> list[Item]:
    output: Any = reply.get("output")
    return cast("list[Item]", output) if isinstance(output, list) else []


def _is_replayable(item: Item) -> bool:
    """Whether any upstream can read an item: only its creator can read reasoning by reference."""
    if item.get("type") != "reasoning":
        return True
    return bool(item.get("encrypted_content") or item.get("content"))


def _name(fields: Any, param: str) -> str | None:
    value = fields.get(param)
    if value is not None and not isinstance(value, str):
        raise RequestError(f"{param} must be a string.", param=param)
    return value


def _conversation_name(fields: Any) -> str | None:
    given = fields.get("conversation")
    if isinstance(given, dict):
        given = cast("Item", given).get("id")
        if not isinstance(given, str):
            raise RequestError("conversation.id must be a string.", param="conversation.id")
        return given
    return _name(fields, "conversation")


def _flag(fields: Any, param: str, *, default: bool) -> bool:
    value = fields.get(param)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise RequestError(f"{param} must be true or false.", param=param)
    return value

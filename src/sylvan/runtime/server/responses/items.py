"""Output items of a response, whole and as a stream of events."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Iterator
from typing import Any

from sylvan.runtime.server.sse import named_event
from sylvan.text.output import Answer, CallStart, Piece, ReasoningDelta, TextDelta

Item = dict[str, Any]


class Numbered:
    """Makes events and numbers them."""

    def __init__(self) -> None:
        self._next = 0

    def event(self, kind: str, **fields: Any) -> bytes:
        """One event."""
        content = {"type": kind, "sequence_number": self._next, **fields}
        self._next += 1
        return named_event(kind, content)


def text_part(text: str) -> Item:
    """The content of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def reasoning_item(text: str, status: str, name: str | None = None) -> Item:
    """Thinking."""
    content = [{"type": "reasoning_text", "text": text}] if text else []
    return {
        "id": name or f"rs_{secrets.token_hex(16)}",
        "type": "reasoning",
        "summary": [],
        "content": content,
        "status": status,
    }


def message_item(text: str | None, status: str, name: str | None = None) -> Item:
    """A message; None: its content is still to come."""
    return {
        "id": name or f"msg_{secrets.token_hex(16)}",
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [] if text is None else [text_part(text)],
    }


def call_item(
    function: str, arguments: str, status: str, names: tuple[str, str] | None = None
) -> Item:
    """A call; `names` are the ids of the item and of the call."""
    item, call = names or (f"fc_{secrets.token_hex(16)}", f"call_{secrets.token_hex(12)}")
    return {
        "id": item,
        "type": "function_call",
        "call_id": call,
        "name": function,
        "arguments": arguments,
        "status": status,
    }


def output_items(answer: Answer, status: str) -> list[Item]:
    """The items of a whole answer; `status` is that of the last, as in a stream."""
    items: list[Item] = []
    for part in answer.parts or [TextDelta("")]:
        state = status if not answer.parts or part is answer.parts[-1] else "completed"
        if isinstance(part, ReasoningDelta):
            items.append(reasoning_item(part.text, state))
        elif isinstance(part, TextDelta):
            items.append(message_item(part.text, state))
        else:
            items.append(call_item(part.name, part.arguments or "{}", state))
    return items


class ItemEvents:
    """Turns pieces of an answer into events; one item is open at a time.

    Attributes:
        done: Items that are complete.
    """

    def __init__(self, numbered: Numbered, ids: Callable[[int], str]) -> None:
        """`ids` makes names of so many bytes."""
        self._ids = ids
        self._event = numbered.event
        self._open: Item | None = None
        self._kind = ""
        self._text = ""
        self.done: list[Item] = []

    def add(self, piece: Piece) -> Iterator[bytes]:
        """Events for a piece."""
        if isinstance(piece, TextDelta):
            yield from self._switch("message", self._message)
            self._text += piece.text
            yield self._delta("response.output_text.delta", piece.text, logprobs=[])
        elif isinstance(piece, ReasoningDelta):
            yield from self._switch("reasoning", self._reasoning)
            self._text += piece.text
            yield self._delta("response.reasoning_text.delta", piece.text)
        elif isinstance(piece, CallStart):
            start = functools.partial(self._call, piece.name)
            yield from self._switch(f"call {piece.index}", start)
        else:
            self._text += piece.fragment
            assert self._open is not None, "arguments follow the start of their call"
            yield self._event(
                "response.function_call_arguments.delta",
                item_id=self._open["id"],
                output_index=len(self.done),
                delta=piece.fragment,
            )

    def end(self, status: str) -> Iterator[bytes]:
        """Events that end the last item; an answer without any gets an empty message."""
        if self._open is None and not self.done:
            yield from self._switch("message", self._message)
        yield from self._close(status)

    def _message(self) -> Item:
        return message_item(None, "in_progress", f"msg_{self._ids(16)}")

    def _reasoning(self) -> Item:
        return reasoning_item("", "in_progress", f"rs_{self._ids(16)}")

    def _call(self, function: str) -> Item:
        names = f"fc_{self._ids(16)}", f"call_{self._ids(12)}"
        return call_item(function, "", "in_progress", names)

    def _switch(self, kind: str, start: Callable[[], Item]) -> Iterator[bytes]:
        if kind == self._kind:
            return
        yield from self._close("completed")
        item = start()
        self._open, self._kind, self._text = item, kind, ""
        index = len(self.done)
        yield self._event("response.output_item.added", output_index=index, item=item)
        if kind in ("message", "reasoning"):
            yield self._event("response.content_part.added", **self._place(), part=self._part(""))

    def _close(self, status: str) -> Iterator[bytes]:
        item, text = self._open, self._text
        if item is None:
            return
        if item["type"] == "function_call":
            arguments = text or "{}"
            done = call_item(item["name"], arguments, status, (item["id"], item["call_id"]))
            yield self._event(
                "response.function_call_arguments.done",
                item_id=item["id"],
                output_index=len(self.done),
                name=item["name"],
                arguments=arguments,
            )
        else:
            is_text = item["type"] == "message"
            make = message_item if is_text else reasoning_item
            done = make(text, status, item["id"])
            kind = "response.output_text.done" if is_text else "response.reasoning_text.done"
            extra: dict[str, Any] = {"logprobs": []} if is_text else {}
            yield self._event(kind, **self._place(), text=text, **extra)
            yield self._event("response.content_part.done", **self._place(), part=self._part(text))
        yield self._event("response.output_item.done", output_index=len(self.done), item=done)
        self.done.append(done)
        self._open, self._kind = None, ""

    def _delta(self, kind: str, text: str, **extra: Any) -> bytes:
        return self._event(kind, **self._place(), delta=text, **extra)

    def _place(self) -> dict[str, Any]:
        assert self._open is not None, "there is an open item"
        return {"item_id": self._open["id"], "output_index": len(self.done), "content_index": 0}

    def _part(self, text: str) -> Item:
        if self._kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return text_part(text)

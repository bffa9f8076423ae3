"""Output items of a response, complete or as stream events."""

from __future__ import annotations

import functools
import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sylvan.api.openai.response_state import pack
from sylvan.api.openai.response_tools import INPUT, ToolOrigin
from sylvan.runtime.server.sse import named_event
from sylvan.text.output import CallStart, ParsedOutput, Piece, ReasoningDelta, TextDelta

Item = dict[str, Any]


class Numbered:
    """Builds numbered events."""

    def __init__(self) -> None:
        self._next = 0

    def event(self, kind: str, **fields: Any) -> bytes:
        """Build one event."""
        content = {"type": kind, "sequence_number": self._next, **fields}
        self._next += 1
        return named_event(kind, content)


@dataclass(frozen=True, slots=True)
class ItemStyle:
    """Output options of the client.

    Attributes:
        origins: What the functions offered to the model are to the client.
        keeps_thinking: Reasoning items contain what the client needs to send them back.
    """

    origins: Mapping[str, ToolOrigin] = field(default_factory=dict[str, ToolOrigin])
    keeps_thinking: bool = False


def text_part(text: str, logprobs: Sequence[Item] = ()) -> Item:
    """Build the content of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def reasoning_item(text: str, status: str, name: str | None = None, *, kept: bool = False) -> Item:
    """Build a reasoning item; `kept`: with what the client needs to send it back."""
    content = [{"type": "reasoning_text", "text": text}] if text else []
    item = {
        "id": name or f"rs_{secrets.token_hex(16)}",
        "type": "reasoning",
        "summary": [],
        "content": content,
        "status": status,
    }
    return item | {"encrypted_content": pack(text)} if kept else item


def message_item(
    text: str | None, status: str, name: str | None = None, logprobs: Sequence[Item] = ()
) -> Item:
    """Build a message; None: its content follows."""
    return {
        "id": name or f"msg_{secrets.token_hex(16)}",
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [] if text is None else [text_part(text, logprobs)],
    }


def call_item(
    origin: ToolOrigin, arguments: str, status: str, names: tuple[str, str] | None = None
) -> Item:
    """Build a call; `names` are the IDs of the item and of the call."""
    prefix = "ctc" if origin.custom else "fc"
    item, call = names or (f"{prefix}_{secrets.token_hex(16)}", f"call_{secrets.token_hex(12)}")
    kind = "custom_tool_call" if origin.custom else "function_call"
    given = {"input": custom_input(arguments)} if origin.custom else {"arguments": arguments}
    space = {"namespace": origin.namespace} if origin.namespace else {}
    return {
        "id": item,
        "type": kind,
        "call_id": call,
        "name": origin.name,
        **space,
        **given,
        "status": status,
    }


def custom_input(arguments: str) -> str:
    """Return the text in the arguments of a custom tool, or malformed arguments unchanged."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    text = value.get(INPUT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments if arguments != "{}" else ""


def output_items(
    answer: ParsedOutput, status: str, style: ItemStyle, logprobs: Sequence[Item] = ()
) -> list[Item]:
    """Build the items of a whole answer; `status` is that of the last, as in a stream."""
    items: list[Item] = []
    rest = list(logprobs)
    for part in answer.parts or [TextDelta("")]:
        state = status if not answer.parts or part is answer.parts[-1] else "completed"
        if isinstance(part, ReasoningDelta):
            items.append(reasoning_item(part.text, state, kept=style.keeps_thinking))
        elif isinstance(part, TextDelta):
            count = _count_covering(rest, part.text)
            items.append(message_item(part.text, state, logprobs=rest[:count]))
            del rest[:count]
        else:
            origin = style.origins.get(part.name, ToolOrigin(part.name))
            items.append(call_item(origin, part.arguments or "{}", state))
    return items


def _count_covering(entries: Sequence[Item], text: str) -> int:
    """Count the next tokens that cover a text; they may start before it and end after it."""
    left = len(text.encode())
    for count, entry in enumerate(entries):
        if left <= 0:
            return count
        left -= len(entry["bytes"])
    return len(entries)


class ItemEvents:
    """Turns pieces of an answer into events; at most one item is open.

    Attributes:
        done: Completed items.
    """

    def __init__(self, numbered: Numbered, style: ItemStyle, ids: Callable[[int], str]) -> None:
        """`ids` makes IDs of a number of bytes."""
        self._ids = ids
        self._event = numbered.event
        self._style = style
        self._logprobs: list[Item] = []
        self._origin = ToolOrigin("")
        self._open: Item | None = None
        self._kind = ""
        self._text = ""
        self.done: list[Item] = []

    def add(self, piece: Piece, logprobs: Sequence[Item] = ()) -> Iterator[bytes]:
        """Return the events for a piece, and the log probabilities of a text's tokens."""
        if isinstance(piece, TextDelta):
            yield from self._switch("message", self._message)
            self._text += piece.text
            self._logprobs += logprobs
            yield self._delta("response.output_text.delta", piece.text, logprobs=list(logprobs))
        elif isinstance(piece, ReasoningDelta):
            yield from self._switch("reasoning", self._reasoning)
            self._text += piece.text
            yield self._delta("response.reasoning_text.delta", piece.text)
        elif isinstance(piece, CallStart):
            origin = self._style.origins.get(piece.name, ToolOrigin(piece.name))
            start = functools.partial(self._call, origin)
            yield from self._switch(f"call {piece.index}", start)
            self._origin = origin
        else:
            self._text += piece.fragment
            assert self._open is not None, "arguments follow the start of their call"
            if self._origin.custom:  # its text is known when it is complete
                return
            yield self._event(
                "response.function_call_arguments.delta",
                item_id=self._open["id"],
                output_index=len(self.done),
                delta=piece.fragment,
            )

    def end(self, status: str) -> Iterator[bytes]:
        """Return the events that end the last item; an empty answer gets an empty message."""
        if self._open is None and not self.done:
            yield from self._switch("message", self._message)
        yield from self._close(status)

    def _message(self) -> Item:
        return message_item(None, "in_progress", f"msg_{self._ids(16)}")

    def _reasoning(self) -> Item:
        return reasoning_item("", "in_progress", f"rs_{self._ids(16)}")

    def _call(self, origin: ToolOrigin) -> Item:
        prefix = "ctc" if origin.custom else "fc"
        names = f"{prefix}_{self._ids(16)}", f"call_{self._ids(12)}"
        return call_item(origin, "", "in_progress", names)

    def _switch(self, kind: str, start: Callable[[], Item]) -> Iterator[bytes]:
        if kind == self._kind:
            return
        yield from self._close("completed")
        item = start()
        self._open, self._kind, self._text, self._logprobs = item, kind, "", []
        index = len(self.done)
        yield self._event("response.output_item.added", output_index=index, item=item)
        if kind in ("message", "reasoning"):
            yield self._event("response.content_part.added", **self._place(), part=self._part(""))

    def _close(self, status: str) -> Iterator[bytes]:
        item, text = self._open, self._text
        if item is None:
            return
        if item["type"] in ("function_call", "custom_tool_call"):
            done = call_item(self._origin, text or "{}", status, (item["id"], item["call_id"]))
            yield from self._end_call(done)
        else:
            is_text = item["type"] == "message"
            if is_text:
                done = message_item(text, status, item["id"], self._logprobs)
            else:
                kept = self._style.keeps_thinking
                done = reasoning_item(text, status, item["id"], kept=kept)
            kind = "response.output_text.done" if is_text else "response.reasoning_text.done"
            extra: dict[str, Any] = {"logprobs": self._logprobs} if is_text else {}
            yield self._event(kind, **self._place(), text=text, **extra)
            yield self._event("response.content_part.done", **self._place(), part=self._part(text))
        yield self._event("response.output_item.done", output_index=len(self.done), item=done)
        self.done.append(done)
        self._open, self._kind = None, ""

    def _end_call(self, done: Item) -> Iterator[bytes]:
        place = {"item_id": done["id"], "output_index": len(self.done)}
        if self._origin.custom:
            kind, text = "response.custom_tool_call_input", done["input"]
            yield self._event(f"{kind}.delta", **place, delta=text)
            yield self._event(f"{kind}.done", **place, input=text)
            return
        kind = "response.function_call_arguments.done"
        yield self._event(kind, **place, name=done["name"], arguments=done["arguments"])

    def _delta(self, kind: str, text: str, **extra: Any) -> bytes:
        return self._event(kind, **self._place(), delta=text, **extra)

    def _place(self) -> dict[str, Any]:
        assert self._open is not None, "there is an open item"
        return {"item_id": self._open["id"], "output_index": len(self.done), "content_index": 0}

    def _part(self, text: str) -> Item:
        if self._kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return text_part(text, self._logprobs)

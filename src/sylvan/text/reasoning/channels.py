"""Outputs made of messages in channels: thinking, calls, and the answer.

gpt-oss and Muse write messages like `<|start|>HEADER<|message|>BODY<|end|>`; the output continues
after the prompt's `<|start|>assistant`.
"""

from __future__ import annotations

from dataclasses import dataclass

from sylvan.text.markers import possible_start
from sylvan.text.spans import SpanLog, TextSpan

_MESSAGE = "<|message|>"
_FILLER = "commentary"
"""A word that gpt-oss writes after a call, before the next message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Channels:
    """Message format of a model family.

    Attributes:
        thinking: Text in the header of a thinking message.
        opens: Markers that start a header.
        closes: Markers that end a body.
        bare: Forms of a header at the start of the output, without a marker.
        keeps_calls: Whether messages that call a tool (with `to=` in the header) are passed on
          with all markers, for the tool parser.
    """

    thinking: str
    opens: tuple[str, ...]
    closes: tuple[str, ...]
    bare: tuple[str, ...] = ()
    keeps_calls: bool = False


HARMONY = Channels(
    thinking="<|channel|>analysis",
    opens=("<|start|>", "<|channel|>"),
    closes=("<|end|>", "<|return|>", "<|call|>"),
    keeps_calls=True,
)
MUSE = Channels(
    thinking="to=self",
    opens=("<|start|>",),
    closes=("<|eom|>", "<|eot|>"),
    bare=(" to=", "to="),
)


class ChannelReasoning:
    """Parser of messages in channels; see `ReasoningParser`."""

    def __init__(self, channels: Channels, *, start_in_reasoning: bool) -> None:
        self._channels = channels
        self._stops = (*channels.closes, *channels.opens)
        self._held = ""
        self._at = 0  # position of the held text in the output
        self._spans = SpanLog()
        self._at_start = bool(channels.bare) and not start_in_reasoning
        self._in_header = False
        self._after_call = False
        self._kind = "reasoning" if start_in_reasoning else "content"

    def feed(self, text: str) -> tuple[str, str]:
        self._held += text
        found = {"reasoning": "", "content": ""}
        if self._at_start and not self._started():
            return "", ""
        while self._in_header or self._held:
            done, kind, part = self._header() if self._in_header else self._body()
            found[kind] += part
            if not done:
                break
        return found["reasoning"], found["content"]

    def finish(self) -> tuple[str, str]:
        held, self._held = self._held, ""
        thinks = self._kind == "reasoning" and not self._in_header
        self._spans.add(self._at, len(held), thinking=thinks)
        return (held, "") if thinks else ("", held)

    def spans(self) -> list[TextSpan]:
        return self._spans.take()

    def _started(self) -> bool:
        """Whether the text so far decides if the output starts with a header."""
        bare = self._channels.bare
        self._in_header = self._held.startswith(bare)
        waits = not self._in_header and any(b.startswith(self._held) for b in bare)
        self._at_start = waits
        return not waits

    def _header(self) -> tuple[bool, str, str]:
        end = self._held.find(_MESSAGE)
        if end < 0:
            return False, "content", ""
        header, start = self._held[:end], self._at
        self._skip(end + len(_MESSAGE))
        self._in_header = False
        channels = self._channels
        if channels.keeps_calls and " to=" in header and "to=user" not in header:
            self._kind = "call"
            self._spans.add(start, end + len(_MESSAGE))
            return True, "content", header + _MESSAGE
        self._kind = "reasoning" if channels.thinking in header else "content"
        return True, "content", ""

    def _skip(self, count: int) -> None:
        self._held = self._held[count:]
        self._at += count

    def _body(self) -> tuple[bool, str, str]:
        kind = "reasoning" if self._kind == "reasoning" else "content"
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        end, stop = min(found, default=(possible_start(self._held, self._stops), ""))
        text, start = self._held[:end], self._at
        if self._after_call and not stop and _FILLER.startswith(text.strip().lower()):
            return False, kind, ""  # may be a word between two messages
        self._skip(end)
        if self._after_call and stop in self._channels.opens and text.strip().lower() == _FILLER:
            text = ""
        self._after_call = False
        if stop in self._channels.opens:
            self._in_header = True
        elif stop:
            self._skip(len(stop))
            text += stop if self._kind == "call" else ""
            self._after_call = self._kind == "call"
            self._kind = "content"
        self._spans.add(start, len(text), thinking=kind == "reasoning")
        return bool(stop), kind, text

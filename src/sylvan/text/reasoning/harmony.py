"""The channels of gpt-oss: analysis is thinking, calls stay as they are, the rest is the answer."""

from __future__ import annotations

from sylvan.text.markers import possible_start

_OPEN = ("<|start|>", "<|channel|>")
_MESSAGE = "<|message|>"
_CLOSE = ("<|end|>", "<|return|>", "<|call|>")
_BODY_STOPS = (*_CLOSE, *_OPEN)


class HarmonyReasoning:
    """Parser of the harmony format; see `ReasoningParser`.

    The output goes on after `<|start|>assistant`. A message that calls a tool (its header has
    `to=`) is passed on with all of its marks, for the tool parser to read.
    """

    def __init__(self) -> None:
        self._held = ""
        self._in_header = False
        self._kind = "content"

    def feed(self, text: str) -> tuple[str, str]:
        """See `ReasoningParser.feed`."""
        self._held += text
        found = {"reasoning": "", "content": ""}
        while self._in_header or self._held:
            done, kind, part = self._header() if self._in_header else self._body()
            found[kind] += part
            if not done:
                break
        return found["reasoning"], found["content"]

    def finish(self) -> tuple[str, str]:
        """See `ReasoningParser.finish`."""
        held, self._held = self._held, ""
        thinks = self._kind == "reasoning" and not self._in_header
        return (held, "") if thinks else ("", held)

    def _header(self) -> tuple[bool, str, str]:
        end = self._held.find(_MESSAGE)
        if end < 0:
            return False, "content", ""
        header, self._held = self._held[:end], self._held[end + len(_MESSAGE) :]
        self._in_header = False
        if " to=" in header and "to=user" not in header:
            self._kind = "call"
            return True, "content", header + _MESSAGE
        self._kind = "reasoning" if "<|channel|>analysis" in header else "content"
        return True, "content", ""

    def _body(self) -> tuple[bool, str, str]:
        kind = "reasoning" if self._kind == "reasoning" else "content"
        found = [(at, stop) for stop in _BODY_STOPS if (at := self._held.find(stop)) >= 0]
        if not found:
            end = possible_start(self._held, _BODY_STOPS)
            text, self._held = self._held[:end], self._held[end:]
            return False, kind, text
        end, stop = min(found)
        text, self._held = self._held[:end], self._held[end:]
        if stop in _OPEN:
            self._in_header = True
        else:
            self._held = self._held[len(stop) :]
            text += stop if self._kind == "call" else ""
        self._kind = "content" if stop in _CLOSE else self._kind
        return True, kind, text

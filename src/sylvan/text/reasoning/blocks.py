"""Outputs in which thinking may start anywhere and repeatedly, and may contain calls."""

from __future__ import annotations

from collections.abc import Sequence

from sylvan.text.markers import possible_start
from sylvan.text.spans import SpanLog, TextSpan


class BlockReasoning:
    """Parser of thinking in blocks; see `ReasoningParser`.

    White space next to block markers is dropped.

    Args:
        start: Marker that starts a block.
        end: Marker that ends a block.
        call: Markers around calls, which belong to the answer even inside a block.
        start_in_reasoning: Whether the output continues a block.
    """

    def __init__(
        self, start: str, end: str, call: tuple[str, str], *, start_in_reasoning: bool
    ) -> None:
        self._start, self._end, self._call = start, end, call
        self._held = ""
        self._at = 0  # position of the held text in the output
        self._place = "thinking" if start_in_reasoning else "answer"
        self._fresh = start_in_reasoning  # whether to drop white space that follows
        self._spans = SpanLog()

    def feed(self, text: str) -> tuple[str, str]:
        self._held += text
        thinking, answer = "", ""
        while True:
            done, part = self._step()
            if part and self._spoke == "thinking":
                thinking += part
            else:
                answer += part
            if not done:
                return thinking, answer

    def finish(self) -> tuple[str, str]:
        held, self._held = self._held, ""
        if self._fresh and not held.strip():
            return "", ""
        thinks = self._place == "thinking"
        self._spans.add(self._at, len(held), thinking=thinks)
        return (held, "") if thinks else ("", held)

    def spans(self) -> list[TextSpan]:
        return self._spans.take()

    def _step(self) -> tuple[bool, str]:
        """Text up to the next marker, or all certain text; and whether there was a marker."""
        place = self._spoke = self._place
        if self._fresh:
            self._skip(len(self._held) - len(self._held.lstrip()))
            self._fresh = not self._held
        if place == "call":
            return self._take(self._call[1:], keeps=True)
        if place == "answer":
            return self._take((self._start,))
        return self._take((self._end, self._start, self._call[0]))

    def _take(self, markers: Sequence[str], *, keeps: bool = False) -> tuple[bool, str]:
        found = [(at, mark) for mark in markers if (at := self._held.find(mark)) >= 0]
        end, mark = min(found, default=(possible_start(self._held, markers), ""))
        text = self._held[: end + (len(mark) if keeps else 0)]
        visible = text.rstrip() if self._spoke == "thinking" else text
        self._spans.add(self._at, len(visible), thinking=self._spoke == "thinking")
        self._skip(len(text) if mark else len(visible))
        if mark and not keeps:
            self._pass(mark)
        elif mark:
            self._place, self._fresh = "thinking", True
        return bool(mark), visible

    def _pass(self, mark: str) -> None:
        """Switch to the mode that the marker starts; call markers are kept."""
        if mark == self._call[0]:
            self._place = "call"
            return
        self._skip(len(mark))
        self._place = "thinking" if mark == self._start else "answer"
        self._fresh = True

    def _skip(self, count: int) -> None:
        self._held = self._held[count:]
        self._at += count

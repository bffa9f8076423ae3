"""Reads text that arrives in pieces, so that grammars can be written as if it were complete.

A grammar is a generator: it yields whenever it needs more text, and no result of a `Reader` method
depends on how the text was split. The text has three parts:

    committed by events | read, but may be returned as text | not read yet
                      ^ committed                            ^ pos
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from sylvan.text.markers import possible_start

_KEPT_CHARS = 4096
T = TypeVar("T")
Steps = Generator[None, None, T]
Sink = Callable[[str], None]


class Malformed(Exception):  # noqa: N818 - a turn in parsing, not an error
    """The text does not match the grammar, or ends too early."""


def past_space(text: str, place: int) -> int:
    """Position after the white space at `place`."""
    while place < len(text) and text[place].isspace():
        place += 1
    return place


class Reader:
    """The text of one output.

    Attributes:
        pos: Reading position. A grammar may move it back, but not before `committed`.
        num_committed: Number of committed characters, from the start of the output.
    """

    def __init__(self) -> None:
        self.pos = 0
        self.num_committed = 0
        self._text = ""
        self._committed = 0
        self._ended = False

    def feed(self, text: str) -> None:
        """Append text."""
        self._text += text

    def end(self) -> None:
        """Declare that no more text will arrive."""
        self._ended = True

    def commit(self) -> None:
        """Commit all text read."""
        self.num_committed += self.pos - self._committed
        self._committed = self.pos

    def take_uncommitted(self) -> str:
        """Commit the text read, and return it, to be reported as text."""
        text = self._text[self._committed : self.pos]
        self.commit()
        return text

    def more(self) -> Steps[None]:
        """Wait for more text.

        Raises:
            Malformed: no more will arrive.
        """
        if self._ended:
            raise Malformed
        yield

    def seek(self, markers: Sequence[str], emit: Sink, *, after_call: bool) -> Steps[str]:
        """Emit text up to the first marker, and consume the marker; "" at the end of the text.

        White space before the marker is left uncommitted with it, and after a call, at the end.
        """
        self._drop_committed()
        longest = max(map(len, markers), default=0)
        while True:
            place, marker = _first(self._text, markers, self.pos)
            end = place if marker else len(self._text)
            if not marker and not self._ended:
                start = max(self.pos, len(self._text) - longest)
                end = start + possible_start(self._text[start:], markers)
            # from `_committed` to `pos` there is only white space
            fresh = self._text[self.pos : end].rstrip()
            stop = self.pos + len(fresh) if fresh else self._committed
            final = self._ended and not marker
            if final and (fresh or not after_call):
                stop = end
            visible = self._text[self._committed : stop]
            emit(visible)
            after_call = after_call and not visible
            self._committed += len(visible)
            self.num_committed += len(visible)
            self.pos = end + len(marker)
            if marker or final:
                return marker
            yield

    def lookahead(self, options: Sequence[str]) -> Steps[str]:
        """The longest option that comes next after white space; "" if none does."""
        while True:
            place = past_space(self._text, self.pos)
            rest = self._text[place : place + 64]
            found = max((o for o in options if rest.startswith(o)), key=len, default="")
            open_ones = (o for o in options if len(o) > len(rest) and o.startswith(rest))
            if self._ended or not any(open_ones):
                return found
            yield

    def accept(self, options: Sequence[str]) -> Steps[str]:
        """Consume the option that comes next; see `lookahead`."""
        found = yield from self.lookahead(options)
        if found:
            self.pos = past_space(self._text, self.pos) + len(found)
        return found

    def expect(self, options: Sequence[str]) -> Steps[str]:
        """As `accept`.

        Raises:
            Malformed: None of the options comes next.
        """
        found = yield from self.accept(options)
        if not found:
            raise Malformed
        return found

    def swallow(self, options: Sequence[str]) -> Steps[None]:
        """Consume any number of the options, in any order."""
        while options and (yield from self.accept(options)):
            pass

    def until(
        self, ends: Sequence[str], *, sink: Sink | None = None, limit: int | None = None
    ) -> Steps[tuple[str, str]]:
        """Read up to and including the first of `ends`; return the text and the end.

        With a sink, text is streamed to it (even if it ends too early), and not returned. Each
        piece counts as read once the sink has received it.

        Raises:
            Malformed: the text ends too early, or exceeds the limit.
        """
        scanned = self.pos
        while True:
            place, end = _first(self._text, ends, scanned)
            if not end:
                scanned += possible_start(self._text[scanned:], ends)
            if limit is not None and (place if end else scanned) - self.pos > limit:
                raise Malformed
            if end:
                text, self.pos = self._text[self.pos : place], place
                if sink:
                    sink(text)
                self.pos = place + len(end)
                return ("" if sink else text), end
            if sink:
                scanned = len(self._text) if self._ended else scanned
                text, self.pos = self._text[self.pos : scanned], scanned
                sink(text)
            yield from self.more()

    def while_in(self, allowed: Callable[[str], bool], limit: int) -> Steps[str]:
        """Read allowed characters, at most `limit`."""
        while True:
            end = self.pos
            while end < len(self._text) and end - self.pos <= limit and allowed(self._text[end]):
                end += 1
            if end < len(self._text) or self._ended or end - self.pos > limit:
                text, self.pos = self._text[self.pos : end], end
                return text
            yield

    def peek(self) -> Steps[str]:
        """The next character that is not white space.

        Raises:
            Malformed: The text ends before it.
        """
        while True:
            place = past_space(self._text, self.pos)
            if place < len(self._text):
                return self._text[place]
            yield from self.more()

    def char(self) -> Steps[str]:
        """Read one character.

        Raises:
            Malformed: The text ends.
        """
        while self.pos >= len(self._text):
            yield from self.more()
        self.pos += 1
        return self._text[self.pos - 1]

    def run_of(self, find: Callable[[str, int], int]) -> str:
        """Read up to the position that `find` returns, within the text that has arrived."""
        end = find(self._text, self.pos)
        text, self.pos = self._text[self.pos : end], end
        return text

    def _drop_committed(self) -> None:
        if self._committed > _KEPT_CHARS:
            self._text = self._text[self._committed :]
            self.pos -= self._committed
            self._committed = 0


def _first(text: str, markers: Sequence[str], start: int) -> tuple[int, str]:
    """Position and text of the first marker, the longest if several match; (-1, "") if none."""
    found = [(at, -len(m), m) for m in markers if (at := text.find(m, start)) >= 0]
    if not found:
        return -1, ""
    place, _, marker = min(found)
    return place, marker

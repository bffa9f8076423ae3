"""Follows the thinking of one output: where it begins, where it ends, and what makes it end."""

from __future__ import annotations

from collections.abc import Sequence

from sylvan.protocol.requests import ThinkingOptions

Marker = tuple[int, ...]


class ThoughtTracker:
    """Where one output is in its thinking: undecided, inside, or over.

    Undecided is an output that may still begin to think, and one that may still write a header
    before its answer: what it has written so far is the beginning of a marker, or nothing.

    Attributes:
        inside: The output thinks.
        over: The output thinks no more, or never did, and no header can come.
        due: Ids of the end marker that must come next, one after the other; empty while the output
            may think on.
        rest: What the token that ended the thinking brought beyond the marker, without the white
            space in between.
    """

    def __init__(self, thinking: ThinkingOptions, tokens: Sequence[bytes] = ()) -> None:
        """`tokens`: bytes by id. With them an end is found however it was split into tokens."""
        self._thinking = thinking
        self._tokens = tokens
        self._markers = (*thinking.starts, *thinking.headers)
        self._seen: list[int] = []  # undecided: all of the marker; inside: as many as a marker has
        self._longest = max(map(len, thinking.ends), default=0)
        ends = [b"".join(tokens[i] for i in end) for end in thinking.ends] if tokens else []
        self._ends = [end for end in ends if end]
        self._keep = max(map(len, self._ends), default=1) - 1  # bytes
        self._text = b""  # inside: the last bytes
        self._spent = 0
        self.inside = bool(thinking.ends) and thinking.inside
        self.over = not thinking.ends or not (self.inside or self._markers)
        self.due: Marker = ()
        self.rest = b""
        self._check_budget()

    @property
    def undecided(self) -> bool:
        """Whether a marker may come, or go on, that is no part of the answer."""
        return not self.inside and not self.over

    @property
    def openings(self) -> Marker:
        """Ids with which a marker begins or goes on, where that is undecided."""
        if not self.undecided:
            return ()
        at = len(self._seen)
        return tuple(dict.fromkeys(marker[at] for marker in self._going_on()))

    def follow(self, token: int) -> bool:
        """Take in a token that was decided.

        Returns whether it is the last of a marker, so that an answer begins after it if at all.
        """
        if self.over:
            return False
        self._seen.append(token)
        if not self.inside:
            return self._open()
        if self._ended(token):
            self._end()
            return True
        if self.due:
            self.due = self.due[1:]
        else:
            self._spent += 1
            self._check_budget()
        self._seen = self._seen[-self._longest :]
        return False

    def _open(self) -> bool:
        """A marker comes with the beginning of the output, or none."""
        seen = tuple(self._seen)
        thinking = self._thinking
        if seen in thinking.starts and seen in self._markers:
            self.inside, self._seen = True, []
            self._check_budget()
            return True
        self.over = not self._going_on()
        return seen in thinking.headers

    def _going_on(self) -> list[Marker]:
        """Markers that are longer than what was written, and begin with it."""
        seen = tuple(self._seen)
        at = len(seen)
        return [marker for marker in self._markers if len(marker) > at and marker[:at] == seen]

    def _ended(self, token: int) -> bool:
        if any(tuple(self._seen[-len(end) :]) == end for end in self._thinking.ends):
            return True
        if not self._ends:
            return False
        self._text += self._tokens[token]
        found = [(at, end) for end in self._ends if (at := self._text.find(end)) >= 0]
        if not found:
            self._text = self._text[max(0, len(self._text) - self._keep) :]
            return False
        at, end = min(found)
        self.rest = self._text[at + len(end) :].lstrip()
        return True

    def _end(self) -> None:
        """The answer comes next, a header before it perhaps."""
        self.inside, self._seen, self.due, self._text = False, [], (), b""
        self._markers = () if self.rest else self._thinking.headers
        self.over = not self._markers

    def _check_budget(self) -> None:
        budget = self._thinking.budget
        if self.inside and budget is not None and self._spent >= budget:
            self.due = self._thinking.ends[0]

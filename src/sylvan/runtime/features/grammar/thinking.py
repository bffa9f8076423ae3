"""Tracks the thinking of one output: where it starts and ends, and when it is forced to end."""

from __future__ import annotations

from collections.abc import Sequence

from sylvan.protocol.requests import ThinkingOptions

Marker = tuple[int, ...]


class ThoughtTracker:
    """The thinking state of one output: undecided, inside, or over.

    Undecided: the output may still start to think, or may still write a header
    before its answer; so far it is a prefix of a marker, or empty.

    Attributes:
        inside: The output is thinking.
        ended: The output has ended its thinking or has none, and no header can follow.
        forced_ids: IDs of the end marker that are forced next; empty while thinking may continue.
        rest: Text after the marker in the token that ended the thinking, without leading white
            space.
    """

    def __init__(self, thinking: ThinkingOptions, tokens: Sequence[bytes] = ()) -> None:
        """`tokens`: bytes by ID. With them, an end marker is found in any tokenisation."""
        self._thinking = thinking
        self._tokens = tokens
        self._markers = (*thinking.starts, *thinking.headers)
        self._seen: list[int] = []  # undecided: the whole marker; inside: the length of a marker
        self._longest = max(map(len, thinking.ends), default=0)
        ends = [b"".join(tokens[i] for i in end) for end in thinking.ends] if tokens else []
        self._ends = [end for end in ends if end]
        self._keep = max(map(len, self._ends), default=1) - 1  # bytes
        self._text = b""  # inside: the last bytes
        self._spent = 0
        self.inside = bool(thinking.ends) and thinking.inside
        self.ended = not thinking.ends or not (self.inside or self._markers)
        self.forced_ids: Marker = ()
        self.rest = b""
        self._check_budget()

    @property
    def undecided(self) -> bool:
        """Whether a marker may start or continue that is not part of the answer."""
        return not self.inside and not self.ended

    @property
    def openings(self) -> Marker:
        """IDs with which a marker may start or continue, while undecided."""
        if not self.undecided:
            return ()
        at = len(self._seen)
        return tuple(dict.fromkeys(marker[at] for marker in self._active_markers()))

    def follow(self, token: int) -> bool:
        """Apply a sampled token.

        Returns whether it is the last token of a marker, so that an answer can start after it.
        """
        if self.ended:
            return False
        self._seen.append(token)
        if not self.inside:
            return self._open()
        if self._ended(token):
            self._end()
            return True
        if self.forced_ids:
            self.forced_ids = self.forced_ids[1:]
        else:
            self._spent += 1
            self._check_budget()
        self._seen = self._seen[-self._longest :]
        return False

    def _open(self) -> bool:
        """Check for a marker, which comes at the start of the output or not at all."""
        seen = tuple(self._seen)
        thinking = self._thinking
        if seen in thinking.starts and seen in self._markers:
            self.inside, self._seen = True, []
            self._check_budget()
            return True
        self.ended = not self._active_markers()
        return seen in thinking.headers

    def _active_markers(self) -> list[Marker]:
        """Return the markers that continue the text so far."""
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
        """End the thinking; the answer follows, perhaps after a header."""
        self.inside, self._seen, self.forced_ids, self._text = False, [], (), b""
        self._markers = () if self.rest else self._thinking.headers
        self.ended = not self._markers

    def _check_budget(self) -> None:
        budget = self._thinking.budget
        if self.inside and budget is not None and self._spent >= budget:
            self.forced_ids = self._thinking.ends[0]

"""Finds the thinking tokens of an output."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sylvan.text.reasoning.families import ReasoningFamily
from sylvan.text.tokenizer import Tokenizer

Ids = tuple[int, ...]

TAIL_TOKENS = 64
_TAIL_CHARS = 256


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """Markers of a model's thinking, as tokens.

    Attributes:
        family: The markers as text.
        starts: Token ids of start markers, with optional leading text.
        ends: Token ids of end markers; the first is the usual one, those of `interrupts` come last.
    """

    family: ReasoningFamily
    starts: tuple[Ids, ...]
    ends: tuple[Ids, ...]

    @classmethod
    def of(cls, family: ReasoningFamily, tokenizer: Tokenizer) -> ReasoningMarks:
        """The markers of a family in a tokenizer's tokens."""
        leading = [lead + start for start in family.starts for lead in family.leads]
        return cls(
            family,
            encoded(tokenizer, (*family.starts, *leading)),
            encoded(tokenizer, (*family.ends, *family.interrupts)),
        )

    def is_open(self, text: str | None, ids: Sequence[int], tokenizer: Tokenizer) -> bool:
        """Whether a prompt, given as text or ids, ends with a start marker."""
        end = text[-_TAIL_CHARS:] if text else ending(tokenizer, ids)
        return end.rstrip().endswith(self.family.starts)


def ending(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Text of the end of a prompt given as ids, which may contain a start marker."""
    return tokenizer.decode(list(ids[-TAIL_TOKENS:]), skip_special_tokens=False)


class ReasoningCounter:
    """Counts the thinking tokens of a sample as they arrive, including markers.

    Args:
        marks: Markers of thinking; None if the model has none.
        inside: The output continues thinking; otherwise it may start with a marker.
    """

    def __init__(self, marks: ReasoningMarks | None, *, inside: bool) -> None:
        self._starts = marks.starts if marks else ()
        self._ends = marks.ends[: len(marks.family.ends)] if marks else ()
        self._state = "inside" if inside and marks else "before"
        self._ids: list[int] = []
        self.count = 0

    def add(self, ids: Sequence[int]) -> None:
        """Add tokens, and update `count`."""
        if self._state == "over":
            return
        self._ids.extend(ids)
        if self._state == "before":
            self._open()
        if self._state == "inside":
            self._continue()

    def _open(self) -> None:
        given = tuple(self._ids)
        if any(given[: len(start)] == start for start in self._starts):
            self._state = "inside"
        elif not any(start[: len(given)] == given for start in self._starts):
            self._state = "over"

    def _continue(self) -> None:
        longest = max(map(len, self._ends), default=1)
        ids = self._ids
        for at in range(max(self.count - longest + 1, 0), len(ids)):
            for end in self._ends:
                if tuple(ids[at : at + len(end)]) == end:
                    self._state, self.count = "over", at + len(end)
                    return
        self.count = len(ids)


def encoded(tokenizer: Tokenizer, marks: Iterable[str]) -> tuple[Ids, ...]:
    """Token ids of markers inside a text, without duplicates."""
    return tuple(dict.fromkeys(tuple(_ids_of(tokenizer, text)) for text in marks))


def _ids_of(tokenizer: Tokenizer, mark: str) -> list[int]:
    """Token ids of a marker inside a text, where no tokenizer inserts a space before it."""
    ids = tokenizer.encode(mark, add_special_tokens=False)
    if b"".join(map(tokenizer.token_bytes, ids)) == mark.encode():
        return ids
    anchor = tokenizer.encode("\n", add_special_tokens=False)
    longer = tokenizer.encode("\n" + mark, add_special_tokens=False)
    return longer[len(anchor) :] if longer[: len(anchor)] == anchor else ids

"""Caches token ids of text segments, which do not depend on the surrounding text."""

from __future__ import annotations

import re
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import pairwise

from sylvan.text.safe_encoding import alternation
from sylvan.text.tokenizer import Tokenizer

ENTRY_BYTES = 256
"""Approximate memory of an entry besides its text and ids, in bytes."""


class SegmentedEncoder:
    """Encodes like a tokenizer, but caches recent segments.

    No merge crosses a control token, so a text is split before each one, and its ids are those of
    its segments. A continued conversation reuses the segments of its last turn, and conversations
    share those of a system prompt. Safe to share between threads.

    Args:
        tokenizer: Encodes segments.
        max_bytes: Approximate memory limit; 0 caches nothing.

    Attributes:
        hits: Characters that were not tokenised again.
    """

    def __init__(self, tokenizer: Tokenizer, max_bytes: int) -> None:
        self._tokenizer = tokenizer
        self._max_bytes = max_bytes
        self._pattern, self._cuts = _boundaries(tokenizer)
        self._known: OrderedDict[str, array[int]] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()
        self.hits = 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if not self._max_bytes or not self._cuts:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        segments = self._segments(text)
        found = self._find(segments)
        missing = [s for s in dict.fromkeys(segments) if s not in found]
        for segment in missing:
            ids = self._tokenizer.encode(segment, add_special_tokens=False)
            found[segment] = array("i", ids)
        self._keep((segment, found[segment]) for segment in missing)
        joined = [token for segment in segments for token in found[segment]]
        if not add_special_tokens:
            return self._tokenizer.affixes.without_second_bos(joined, text)
        return self._tokenizer.affixes.added(joined, text)

    def _segments(self, text: str) -> list[str]:
        """Split the text before each control token."""
        starts = [m.start() for m in self._pattern.finditer(text) if m[0] in self._cuts]
        edges = [0, *(start for start in starts if start), len(text)]
        return [text[a:b] for a, b in pairwise(edges)]

    def _find(self, segments: Sequence[str]) -> dict[str, array[int]]:
        found: dict[str, array[int]] = {}
        with self._lock:
            for segment in segments:
                ids = self._known.get(segment)
                if ids is not None:
                    found[segment] = ids
                    self._known.move_to_end(segment)
                    self.hits += len(segment)
        return found

    def _keep(self, entries: Iterable[tuple[str, array[int]]]) -> None:
        with self._lock:
            for segment, ids in entries:
                if segment not in self._known:
                    self._known[segment] = ids
                    self._num_bytes += _bytes_of(segment, ids)
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= _bytes_of(*self._known.popitem(last=False))


def _boundaries(tokenizer: Tokenizer) -> tuple[re.Pattern[str], frozenset[str]]:
    """Where texts can be split so that the ids of the whole are those of its parts.

    Returns:
        A pattern that finds added tokens as the tokenizer does, and the tokens before which a text
        may be split; none if the ids of parts differ from the ids of the whole.
    """
    exact = [each for each in tokenizer.added_tokens if each.content and not each.normalized]
    whole = tokenizer.affixes.around is not None
    cuts = frozenset(
        each.content
        for each in exact
        if whole and not (each.lstrip or each.rstrip or each.single_word)
    )
    return alternation(each.content for each in exact), cuts


def _bytes_of(segment: str, ids: array[int]) -> int:
    return sys.getsizeof(segment) + len(ids) * ids.itemsize + ENTRY_BYTES

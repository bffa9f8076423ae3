"""Texts beside a request in which its guesses may be looked for: of its tenant, or given ones.

Shapes: n tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from sylvan.protocol.arrays import IntArray
from sylvan.runtime.core.req import Req

END = -1
"""Stands after each text; no token is equal to it."""
MOST_TENANTS = 64


class Corpus:
    """The newest texts, one after another, up to so many tokens."""

    def __init__(self, most_tokens: int) -> None:
        self._ids = np.empty(most_tokens, np.int32)
        self._length = 0

    @property
    def ids(self) -> IntArray:
        """All tokens, with `END` after each text."""
        return self._ids[: self._length]

    def add(self, text: IntArray) -> None:
        """One more text; the oldest tokens make room, half of them at once."""
        most = len(self._ids)
        text = text[-(most // 2 - 1) :]
        if self._length + len(text) + 1 > most:
            kept = self._ids[self._length - most // 2 : self._length].copy()
            self._ids[: len(kept)], self._length = kept, len(kept)
        stop = self._length + len(text)
        self._ids[self._length : stop] = text
        self._ids[stop] = END
        self._length = stop + 1


def corpus_of(texts: Iterable[Sequence[int]], most_tokens: int) -> Corpus:
    """Given texts, as far as they fit."""
    chosen: list[IntArray] = []
    total = 0
    for text in texts:
        total += len(text) + 1
        if total > most_tokens:
            break
        chosen.append(np.array(text, np.int32))
    found = Corpus(2 * max(2, sum(len(text) + 1 for text in chosen)))
    for text in chosen:
        found.add(text)
    return found


class TenantCorpora:
    """What requests of each tenant said and were asked; no tenant finds another's texts.

    Args:
        most_tokens: Of a tenant.
    """

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._of: OrderedDict[tuple[str, str], Corpus] = OrderedDict()

    def find(self, req: Req) -> Corpus | None:
        """Texts that `req` may be guessed from."""
        return self._of.get(_owner(req))

    def add(self, req: Req) -> None:
        """Keep the text of a request that has ended."""
        owner = _owner(req)
        corpus = self._of.pop(owner, None) or Corpus(self._most_tokens)
        corpus.add(req.tokens.view(0, req.tokens.length))
        self._of[owner] = corpus
        if len(self._of) > MOST_TENANTS:
            self._of.popitem(last=False)


def _owner(req: Req) -> tuple[str, str]:
    """Those whose prefixes may be shared are those whose texts may."""
    return req.request.tenant, req.request.cache_salt

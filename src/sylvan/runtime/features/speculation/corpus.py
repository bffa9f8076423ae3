"""Texts beside a request in which its guesses may be looked for: of its tenant, or given ones.

Shapes: n tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from sylvan.protocol.arrays import IntArray
from sylvan.protocol.errors import RequestError
from sylvan.protocol.messages import AddCorpus, CorpusCommand, ListCorpora, RemoveCorpus
from sylvan.runtime.core.req import Req

END = -1
"""Stands after each text; no token is equal to it."""
MOST_TENANTS = 64
MOST_CORPORA = 64


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


class GivenCorpora:
    """Texts for all requests, by the name of their corpus.

    Args:
        most_tokens: Of all of them, with one more for each text.
    """

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._of: dict[str, Corpus] = {}

    @property
    def every(self) -> Sequence[Corpus]:
        """All of them."""
        return tuple(self._of.values())

    def add(self, name: str, texts: Iterable[Sequence[int]]) -> int:
        """Texts under a name, instead of others of that name; returns how many tokens they are.

        Raises:
            RequestError: they are too many, or none; nothing has changed.
        """
        others = {own: corpus for own, corpus in self._of.items() if own != name}
        room = self._most_tokens - sum(len(corpus.ids) for corpus in others.values())
        chosen: list[IntArray] = []
        for text in texts:
            room -= len(text) + 1
            if room < 0:
                raise RequestError(
                    f"corpora have at most {self._most_tokens} tokens (speculative.corpus_tokens)"
                )
            chosen.append(np.array(text, np.int32))
        if not chosen or len(others) >= MOST_CORPORA:
            raise RequestError(f"a corpus has texts, and there are at most {MOST_CORPORA} corpora")
        total = sum(len(text) + 1 for text in chosen)
        self._of[name] = found = Corpus(2 * total + 2)
        for text in chosen:
            found.add(text)
        return total - len(chosen)

    def execute(self, command: CorpusCommand) -> dict[str, Any]:
        """Carry out a command; returns the body of its reply.

        Raises:
            RequestError: see `add`; or there is no such corpus (404).
        """
        match command:
            case AddCorpus(id=name, texts=texts):
                return {"corpus_id": name, "loaded_token_count": self.add(name, texts)}
            case RemoveCorpus(id=name):
                if self._of.pop(name, None) is None:
                    raise RequestError(f"there is no corpus {name!r}", status=404)
                return {}
            case ListCorpora():
                counts = {name: int((corpus.ids != END).sum()) for name, corpus in self._of.items()}
                return {"corpus_token_counts": counts}


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

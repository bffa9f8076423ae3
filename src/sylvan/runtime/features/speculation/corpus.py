"""Texts outside a request from which it may be drafted: its tenant's, or given corpora.

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
"""Separator after each text; equal to no token."""
MAX_TENANTS = 64
MAX_CORPORA = 64


class Corpus:
    """The newest texts, concatenated, up to a number of tokens."""

    def __init__(self, max_tokens: int) -> None:
        self._ids = np.empty(max_tokens, np.int32)
        self._length = 0

    @property
    def ids(self) -> IntArray:
        """All tokens, with `END` after each text."""
        return self._ids[: self._length]

    def add(self, text: IntArray) -> None:
        """Add a text; the oldest tokens are dropped, half of them at once."""
        limit = len(self._ids)
        text = text[-(limit // 2 - 1) :]
        if self._length + len(text) + 1 > limit:
            kept = self._ids[self._length - limit // 2 : self._length].copy()
            self._ids[: len(kept)], self._length = kept, len(kept)
        stop = self._length + len(text)
        self._ids[self._length : stop] = text
        self._ids[stop] = END
        self._length = stop + 1


class GivenCorpora:
    """Corpora for all requests, by name.

    Args:
        max_tokens: Total size, including one separator per text.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._of: dict[str, Corpus] = {}

    @property
    def every(self) -> Sequence[Corpus]:
        """All corpora."""
        return tuple(self._of.values())

    def add(self, name: str, texts: Iterable[Sequence[int]]) -> int:
        """Add a corpus, replacing one of that name; return its number of tokens.

        Raises:
            RequestError: There are too many tokens, or none; nothing has changed.
        """
        others = {own: corpus for own, corpus in self._of.items() if own != name}
        room = self._max_tokens - sum(len(corpus.ids) for corpus in others.values())
        chosen: list[IntArray] = []
        for text in texts:
            room -= len(text) + 1
            if room < 0:
                raise RequestError(
                    f"corpora have at most {self._max_tokens} tokens (speculative.corpus_tokens)"
                )
            chosen.append(np.array(text, np.int32))
        if not chosen or len(others) >= MAX_CORPORA:
            raise RequestError(f"a corpus has texts, and there are at most {MAX_CORPORA} corpora")
        total = sum(len(text) + 1 for text in chosen)
        self._of[name] = found = Corpus(2 * total + 2)
        for text in chosen:
            found.add(text)
        return total - len(chosen)

    def execute(self, command: CorpusCommand) -> dict[str, Any]:
        """Execute a command; return the body of its reply.

        Raises:
            RequestError: See `add`; or there is no such corpus (404).
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
    """Prompts and outputs of each tenant; no tenant is drafted from another's texts.

    Args:
        max_tokens: Size per tenant.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._of: OrderedDict[tuple[str, str], Corpus] = OrderedDict()

    def find(self, req: Req) -> Corpus | None:
        """Return the texts from which `req` may be drafted."""
        return self._of.get(_owner(req))

    def add(self, req: Req) -> None:
        """Add the text of a finished request."""
        owner = _owner(req)
        corpus = self._of.pop(owner, None) or Corpus(self._max_tokens)
        corpus.add(req.tokens.view(0, req.tokens.length))
        self._of[owner] = corpus
        if len(self._of) > MAX_TENANTS:
            self._of.popitem(last=False)


def _owner(req: Req) -> tuple[str, str]:
    """Return the owner: texts are shared exactly where cached prefixes are."""
    return req.request.tenant, req.request.cache_salt

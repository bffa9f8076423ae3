"""Worker half of grammars: masks before a token is sampled, the next state right after."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import ClassVar

from sylvan.protocol.errors import ConfigError, RequestError
from sylvan.runtime.executor.capability import CapabilityWorker
from sylvan.runtime.features.grammar.api import CompiledGrammar
from sylvan.runtime.features.grammar.loaders import Loaders
from sylvan.runtime.features.grammar.matchers import Matchers
from sylvan.runtime.features.grammar.work import GrammarData, GrammarWork
from sylvan.runtime.sampling.constraints import Constraints


class GrammarWorker(CapabilityWorker):
    """Constrains outputs with `Matchers`.

    Args:
        matchers: They look up a request's grammar in `grammars`.
        grammars: By request ID; filled here.
        loaders: Creates the loaders; called for the first grammar that is not loaded.
        loaded: Returns grammars that this process has already loaded, by digest.
    """

    name: ClassVar = "grammar"

    def __init__(
        self,
        matchers: Matchers,
        grammars: dict[str, CompiledGrammar | str],
        loaders: Callable[[], Loaders],
        loaded: Callable[[str], CompiledGrammar | None] = lambda digest: None,
    ) -> None:
        self._matchers, self._grammars = matchers, grammars
        self._make_loaders, self._loaded = loaders, loaded
        self._loaders: Loaders | None = None
        self._known: dict[str, CompiledGrammar | str] = {}  # by digest; or the error of loading it
        self._digests: dict[str, str] = {}  # of requests
        self._uses = Counter[str]()  # of digests

    @property
    def constraints(self) -> Constraints:
        return self._matchers

    def prepare(self, work: GrammarWork) -> None:
        for rid in work.ended:
            self._forget(rid)
        for grammar in work.grammars:
            self._known[grammar.digest] = self._load(grammar)
        for rid, digest in work.requests.items():
            self._digests[rid] = digest
            self._uses[digest] += 1
            self._grammars[rid] = self._known[digest]
        for rid, banned in work.banned.items():
            self._matchers.ban(rid, banned.position, banned.token_ids)

    def close(self) -> None:
        self._matchers.close()
        if self._loaders is not None:
            self._loaders.close()

    def _load(self, grammar: GrammarData) -> CompiledGrammar | str:
        if (found := self._loaded(grammar.digest)) is not None:
            return found
        try:
            if self._loaders is None:
                self._loaders = self._make_loaders()
            return self._loaders.of(grammar.library).load(grammar.data)
        except (RequestError, ConfigError, ValueError) as error:
            return str(error)

    def _forget(self, rid: str) -> None:
        digest = self._digests.pop(rid)
        self._matchers.forget_banned(rid)
        del self._grammars[rid]
        self._uses[digest] -= 1
        if not self._uses[digest]:
            del self._uses[digest], self._known[digest]

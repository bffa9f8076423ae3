"""Loads grammars into processes of their own, in threads that only wait for them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from sylvan.protocol.errors import RequestError
from sylvan.runtime.features.grammar.api import CompiledGrammar, GrammarLoader

_THREADS = 2

Loaded = Callable[[CompiledGrammar | RequestError], None]
"""Takes a grammar, or why there is none."""


class ApartLoader:
    """Waits for loaders that are isolated. All methods are for one other thread.

    Args:
        post: Has a call made in that other thread; called from those here.
    """

    def __init__(self, post: Callable[[Callable[[], None]], None]) -> None:
        self._post = post
        self._threads: ThreadPoolExecutor | None = None

    def load(self, loader: GrammarLoader, data: bytes, loaded: Loaded) -> None:
        """Have `data` loaded, then `loaded` called where `post` says."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_THREADS, "sylvan-grammar-apart")
        self._threads.submit(self._work, loader, data, loaded)

    def close(self) -> None:
        """End the threads, once the processes that they wait for have ended."""
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
            self._threads = None

    def _work(self, loader: GrammarLoader, data: bytes, loaded: Loaded) -> None:
        found: CompiledGrammar | RequestError
        try:
            found = loader.load(data)
        except RequestError as error:
            found = error
        self._post(lambda: loaded(found))

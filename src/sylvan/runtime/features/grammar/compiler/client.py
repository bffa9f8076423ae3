"""The scheduler's side: requests compilation, loads the results, caches them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from sylvan.protocol.errors import ConfigError, RequestError
from sylvan.runtime.features.grammar.api import CompiledGrammar
from sylvan.runtime.features.grammar.cache import GrammarCache, GrammarStore
from sylvan.runtime.features.grammar.compiler.pool import (
    NICENESS,
    CompileOrder,
    CompilePool,
    PoolLostError,
)
from sylvan.runtime.features.grammar.guard.guard import GuardedGrammar
from sylvan.runtime.features.grammar.guard.tokens import TokenKinds
from sylvan.runtime.features.grammar.guard.watch_factory import watch_factory
from sylvan.runtime.features.grammar.limits import Limits
from sylvan.runtime.features.grammar.loaders import Loaders
from sylvan.runtime.features.grammar.spec import GrammarSpec, check_size
from sylvan.runtime.features.grammar.wire import Prepare, preparation
from sylvan.runtime.features.grammar.work import CompileResult, GrammarData, LoadedGrammar

logger = logging.getLogger(__name__)

_ISOLATED_LOADS = 2  # concurrent loads; their threads only wait


@dataclass(slots=True, eq=False)
class Ticket:
    """A grammar being compiled. Written by the compiler's thread; `done` is set last."""

    spec: GrammarSpec
    digest: str
    id: int
    waiting: int = 0  # waiting requests; counted by the owner of the compiler
    grammar: LoadedGrammar | None = None
    error: RequestError | None = None
    done: bool = False
    cancelled: bool = False

    def fail(self, error: RequestError) -> None:
        """Record the error."""
        self.error = error
        self.done = True


@dataclass(frozen=True, slots=True)
class CompilerSetup:
    """The loader of compiled grammars; `store` caches them on disk, if enabled."""

    loaders: Loaders
    store: GrammarStore | None = None


@dataclass(slots=True)
class CompilerStats:
    """Counts since the start. `restarts` counts starts of the compile process."""

    compiled: int = 0
    refused: int = 0
    timeouts: int = 0
    cache_hits: int = 0
    disk_hits: int = 0
    restarts: int = 0
    compile_s: float = 0.0
    slowest_s: float = 0.0


class GrammarCompiler:
    """Compiles grammars in the background; each request waits only for its own grammar.

    `request` and `forget` never block. Processes and threads start with the first grammar that is
    not cached.

    Args:
        name: Name of the backend, for the processes.
        setup: Creates the loader; called in the compiler's thread for the first grammar.
        limits: Limits of compiling one grammar.
    """

    def __init__(self, name: str, setup: Callable[[], CompilerSetup], limits: Limits) -> None:
        self._name, self._make_setup, self._limits = name, setup, limits
        self._setup: CompilerSetup | None = None
        self._kinds: TokenKinds | None = None  # created with the first guarded schema
        self._cache = GrammarCache()
        self._ids = itertools.count(1)
        self._underway: dict[str, Ticket] = {}  # by digest; owned by the requesting thread
        self._thread = ThreadPoolExecutor(1, "sylvan-grammar", initializer=_lower_priority)
        self._waiting = ThreadPoolExecutor(_ISOLATED_LOADS, "sylvan-grammar-load")
        self._pool = CompilePool(self._preparation)
        self._stats = CompilerStats()

    @property
    def stats(self) -> CompilerStats:
        """Return counts since the start."""
        self._stats.restarts = self._pool.starts
        return self._stats

    def request(self, spec: GrammarSpec) -> Ticket:
        """Request a grammar; concurrent requests for the same grammar share a ticket."""
        digest = spec.digest
        ticket = self._underway.get(digest)
        if ticket is not None and not ticket.done:
            ticket.waiting += 1
            return ticket
        ticket = Ticket(spec, digest, next(self._ids), waiting=1)
        if self._from_cache(ticket):
            return ticket
        self._underway[digest] = ticket
        self._post(self._begin, ticket)
        return ticket

    def forget(self, ticket: Ticket) -> None:
        """Withdraw one request; cancel the compilation if there is none left."""
        ticket.waiting -= 1
        if ticket.waiting > 0:
            return
        if self._underway.get(ticket.digest) is ticket:
            del self._underway[ticket.digest]
        if not ticket.done:
            ticket.cancelled = True
            self._post(self._cancel, ticket)

    def close(self) -> None:
        """Stop the processes and the threads."""
        self._pool.close()  # release the waiting threads
        self._thread.shutdown(wait=True, cancel_futures=True)
        if self._setup is not None:
            self._setup.loaders.close()
        self._waiting.shutdown(wait=True, cancel_futures=True)

    def _from_cache(self, ticket: Ticket) -> bool:
        found = self._cache.get(ticket.digest)
        if found is None:
            return False
        self._stats.cache_hits += 1
        if isinstance(found, str):
            ticket.fail(RequestError(found, param=ticket.spec.kind))
        else:
            ticket.grammar, ticket.done = found, True
        return True

    def _post(self, step: Callable[..., None], ticket: Ticket, *found: object) -> None:
        """Run the next step of a grammar in the compiler's thread."""
        with contextlib.suppress(RuntimeError):  # closed: no request waits
            future = self._thread.submit(self._do, step, ticket, *found)
            future.add_done_callback(lambda future: _report(ticket, future))

    # ---- in the compiler's thread

    def _do(self, step: Callable[..., None], ticket: Ticket, *found: object) -> None:
        """Run a step; any exception is that grammar's error."""
        try:
            step(ticket, *found)
        except RequestError as error:
            if error.status == 400:
                self._refuse(ticket, str(error))
            else:
                ticket.fail(error)
        except ConfigError as error:
            ticket.fail(RequestError(str(error), param=ticket.spec.kind, status=500))

    def _begin(self, ticket: Ticket) -> None:
        if ticket.cancelled:
            return
        check_size(ticket.spec)
        store = self._ready().store
        stored = store.read(ticket.digest) if store is not None else None
        if stored is None:
            self._compile(ticket)
        else:
            self._load(ticket, stored, self._loaded_stored)

    def _compile(self, ticket: Ticket) -> None:
        spec = ticket.spec
        order = CompileOrder(id=ticket.id, kind=spec.kind, text=spec.text, exact=spec.exact)
        future = self._pool.submit(order)
        future.add_done_callback(lambda future: self._post(self._finish, ticket, future))

    def _cancel(self, ticket: Ticket) -> None:
        self._pool.cancel(ticket.id)

    def _preparation(self) -> Prepare:
        return preparation(self._name, self._ready().loaders.vocabulary, self._limits)

    def _finish(self, ticket: Ticket, future: Future[CompileResult]) -> None:
        """Handle the result of compiling: an error, or data to load."""
        try:
            result = future.result()
        except PoolLostError:
            message = "the compiler of grammars ended; try again"
            raise RequestError(message, param=ticket.spec.kind, status=503) from None
        stats = self._stats
        stats.compile_s += result.seconds
        stats.slowest_s = max(stats.slowest_s, result.seconds)
        if result.reason:
            stats.timeouts += result.timed_out
            raise RequestError(result.reason, param=ticket.spec.kind)
        store = self._ready().store
        if store is not None:
            store.write(ticket.digest, result)
        self._load(ticket, result, self._loaded)

    def _load(self, ticket: Ticket, result: CompileResult, then: Callable[..., None]) -> None:
        """Load here, or wait in another thread if loading happens in a process."""
        loader = self._ready().loaders.of(result.library)
        load = functools.partial(loader.load, result.data)
        if loader.isolated:
            future = self._waiting.submit(load)
            future.add_done_callback(lambda future: self._post(then, ticket, result, future))
            return
        future = Future[CompiledGrammar]()
        try:
            future.set_result(load())
        except RequestError as error:
            future.set_exception(error)
        then(ticket, result, future)

    def _loaded_stored(
        self, ticket: Ticket, result: CompileResult, future: Future[CompiledGrammar]
    ) -> None:
        if future.exception() is not None:  # stored by another version
            self._compile(ticket)
            return
        self._stats.disk_hits += 1
        self._loaded(ticket, result, future)

    def _loaded(
        self, ticket: Ticket, result: CompileResult, future: Future[CompiledGrammar]
    ) -> None:
        """Publish a grammar."""
        grammar = future.result()
        data = GrammarData(ticket.digest, result.library, result.data)
        found = LoadedGrammar(grammar, data, self._guard(ticket.spec, result, grammar))
        self._cache.put(ticket.digest, found, result.memory_bytes + len(result.data))
        self._stats.compiled += 1
        ticket.grammar, ticket.done = found, True

    def _guard(
        self, spec: GrammarSpec, result: CompileResult, grammar: CompiledGrammar
    ) -> GuardedGrammar | None:
        """Build the guard for the rest of a schema; None if the grammar enforces all of it."""
        if not result.lost:
            return None
        watch = watch_factory(spec, result.lost)
        if self._kinds is None:
            self._kinds = TokenKinds(self._ready().loaders.vocabulary)
        return GuardedGrammar(grammar, watch, self._kinds)

    def _refuse(self, ticket: Ticket, reason: str) -> None:
        self._stats.refused += 1
        self._cache.put(ticket.digest, reason, len(reason))
        ticket.fail(RequestError(reason, param=ticket.spec.kind))

    def _ready(self) -> CompilerSetup:
        if self._setup is None:
            self._setup = self._make_setup()
        return self._setup


def _report(ticket: Ticket, future: Future[None]) -> None:
    """Fail the grammar if an internal error ended its step."""
    error = None if future.cancelled() else future.exception()
    if error is not None:
        logger.error("a grammar cannot be compiled", exc_info=error)
        message = f"{type(error).__name__} in the grammar compiler"
        ticket.fail(RequestError(message, param=ticket.spec.kind, status=500))


def _lower_priority() -> None:
    """Lower this thread's priority below decoding, if the system supports that."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        before = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, max(before, NICENESS))

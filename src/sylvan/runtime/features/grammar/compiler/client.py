"""The scheduler's side: asks for proofs, loads what was proved, keeps it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from sylvan.protocol.errors import ConfigError, RequestError
from sylvan.runtime.features.grammar.api import CompiledGrammar
from sylvan.runtime.features.grammar.cache import GrammarCache
from sylvan.runtime.features.grammar.compiler.apart import ApartLoader, Loaded
from sylvan.runtime.features.grammar.compiler.cores import CoreWatch
from sylvan.runtime.features.grammar.compiler.loader import IdleLoader
from sylvan.runtime.features.grammar.compiler.messages import Proof, Prove
from sylvan.runtime.features.grammar.compiler.priority import thread_steps_back
from sylvan.runtime.features.grammar.compiler.provers import Answers, Provers
from sylvan.runtime.features.grammar.compiler.store import GrammarStore
from sylvan.runtime.features.grammar.guard.guard import GuardedGrammar
from sylvan.runtime.features.grammar.guard.tokens import TokenKinds
from sylvan.runtime.features.grammar.guard.watcher import watcher
from sylvan.runtime.features.grammar.limits import Limits
from sylvan.runtime.features.grammar.loaders import Loaders
from sylvan.runtime.features.grammar.spec import GrammarSpec, check_size
from sylvan.runtime.features.grammar.wire import Prepare, preparation
from sylvan.runtime.features.grammar.work import GrammarData, LoadedGrammar

_END_S = 5.0


@dataclass(slots=True, eq=False)
class Ticket:
    """A grammar on its way. Written by the compiler's threads; `done` is set last."""

    spec: GrammarSpec
    digest: str
    id: int
    waiting: int = 0  # requests; kept by the owner of the compiler
    grammar: LoadedGrammar | None = None
    error: RequestError | None = None
    done: bool = False
    cancelled: bool = False

    def fail(self, error: RequestError) -> None:
        """It cannot be had."""
        self.error = error
        self.done = True


@dataclass(frozen=True, slots=True)
class Setup:
    """What loads grammars that were proved; `store` keeps the proofs on disk, if wished."""

    loaders: Loaders
    store: GrammarStore | None = None


@dataclass(slots=True)
class CompilerStats:
    """Counts since the start.

    `restarts` are starts of the compiling process. `idle_loads`: of `compiled`, those that took no
    busy core; `starved`: grammars for which idle cores were too few, so that others had to wait.
    """

    compiled: int = 0
    refused: int = 0
    timeouts: int = 0
    cache_hits: int = 0
    disk_hits: int = 0
    restarts: int = 0
    idle_loads: int = 0
    starved: int = 0
    compile_s: float = 0.0
    slowest_s: float = 0.0


class GrammarCompiler:
    """Compiles grammars off the thread that asks; each asker waits for its own grammar only.

    `request` and `forget` never block. Processes and threads start with the first grammar that is
    not cached.

    Args:
        name: Of the backend, by which processes find it.
        setup: Makes what loads grammars; called in the compiler's thread, with the first of them.
        limits: What compiling one grammar may take.
    """

    def __init__(self, name: str, setup: Callable[[], Setup], limits: Limits) -> None:
        self._name, self._make_setup, self._limits = name, setup, limits
        self._setup: Setup | None = None
        self._kinds: TokenKinds | None = None  # made with the first schema that is guarded
        self._cache = GrammarCache()
        self._ids = itertools.count(1)
        self._underway: dict[str, Ticket] = {}  # by digest; of the asking thread
        self._orders: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._owed: dict[int, Ticket] = {}  # by whoever proves
        answers = Answers(self._finish, self._lose)
        self._provers = Provers(self._preparation, self._orders.put, answers)
        watch = CoreWatch(helpers=lambda: self._provers.pids)
        self._idle = IdleLoader(self._orders.put, watch)
        self._apart = ApartLoader(self._orders.put)
        self._stats = CompilerStats()

    @property
    def stats(self) -> CompilerStats:
        """Counts since the start."""
        self._stats.restarts, self._stats.starved = self._provers.starts, self._provers.moved
        return self._stats

    def request(self, spec: GrammarSpec) -> Ticket:
        """Ask for a grammar; the same ticket for all that ask for it meanwhile."""
        digest = spec.digest
        ticket = self._underway.get(digest)
        if ticket is not None and not ticket.done:
            ticket.waiting += 1
            return ticket
        ticket = Ticket(spec, digest, next(self._ids), waiting=1)
        if self._from_cache(ticket):
            return ticket
        self._underway[digest] = ticket
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="sylvan-grammar", daemon=True)
            self._thread.start()
        self._orders.put(lambda: self._begin(ticket))
        return ticket

    def forget(self, ticket: Ticket) -> None:
        """One asker less; what nobody waits for is stopped."""
        ticket.waiting -= 1
        if ticket.waiting > 0:
            return
        if self._underway.get(ticket.digest) is ticket:
            del self._underway[ticket.digest]
        if not ticket.done:
            ticket.cancelled = True
            self._orders.put(lambda: self._cancel(ticket))

    def close(self) -> None:
        """End the processes and the threads."""
        if self._thread is not None:
            self._orders.put(None)
            self._thread.join(_END_S)
            self._thread = None

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

    # ---- in the compiler's thread

    def _work(self) -> None:
        thread_steps_back()
        while True:
            try:
                order = self._orders.get(timeout=self._patience_s())
            except Empty:
                self._look_after()
                continue
            if order is None:
                break
            order()
            self._look_after()
        self._idle.close()
        self._provers.close()
        if self._setup is not None:
            self._setup.loaders.close()
        self._apart.close()

    def _patience_s(self) -> float | None:
        due_s = [s for s in (self._idle.patience_s, self._provers.patience_s) if s is not None]
        return min(due_s, default=None)

    def _look_after(self) -> None:
        """See to what takes too long."""
        for keep in self._idle.overdue():
            keep(None)
        self._provers.tend()

    def _begin(self, ticket: Ticket) -> None:
        if ticket.cancelled:
            return
        try:
            check_size(ticket.spec)
            setup = self._ready()
        except RequestError as error:
            self._refuse(ticket, str(error))
            return
        except ConfigError as error:
            ticket.fail(RequestError(str(error), param=ticket.spec.kind, status=500))
            return
        stored = setup.store.read(ticket.digest) if setup.store is not None else None
        if stored is None:
            self._prove(ticket)
        else:
            self._load_stored(ticket, stored)

    def _prove(self, ticket: Ticket) -> None:
        self._owed[ticket.id] = ticket
        self._provers.prove(_order(ticket))

    def _ready(self) -> Setup:
        if self._setup is None:
            self._setup = self._make_setup()
        return self._setup

    def _load_stored(self, ticket: Ticket, stored: Proof) -> None:
        def loaded(found: CompiledGrammar | RequestError) -> None:
            if isinstance(found, RequestError):
                self._prove(ticket)
                return
            self._stats.disk_hits += 1
            self._keep(ticket, stored, found)

        self._load(stored, loaded)

    def _load(self, proof: Proof, loaded: Loaded) -> None:
        """Load here, or have a process do it."""
        loader = self._ready().loaders.of(proof.library)
        if loader.isolated:
            self._apart.load(loader, proof.data, loaded)
            return
        try:
            found = loader.load(proof.data)
        except RequestError as error:
            loaded(error)
        else:
            loaded(found)

    def _cancel(self, ticket: Ticket) -> None:
        if self._owed.pop(ticket.id, None):
            self._provers.cancel(ticket.id)

    def _preparation(self) -> Prepare:
        return preparation(self._name, self._ready().loaders.vocabulary, self._limits)

    def _finish(self, proof: Proof) -> None:
        ticket = self._owed.pop(proof.id)
        stats = self._stats
        stats.compile_s += proof.seconds
        stats.slowest_s = max(stats.slowest_s, proof.seconds)
        if proof.reason:
            stats.timeouts += proof.timed_out
            self._refuse(ticket, proof.reason)
            return
        setup = self._ready()
        if setup.store is not None:
            setup.store.write(ticket.digest, proof)

        def loaded(found: CompiledGrammar | RequestError) -> None:
            if not isinstance(found, RequestError):
                self._keep(ticket, proof, found)
            elif found.status == 400:
                self._refuse(ticket, str(found))
            else:
                ticket.fail(found)

        def keep(grammar: CompiledGrammar | None) -> None:
            if grammar is None:
                self._load(proof, loaded)
            else:
                self._stats.idle_loads += 1
                self._keep(ticket, proof, grammar)

        loader = setup.loaders.of(proof.library)
        if loader.isolated or not self._idle.lend(loader, proof, keep):
            keep(None)

    def _keep(self, ticket: Ticket, proof: Proof, grammar: CompiledGrammar) -> None:
        """Hand out a grammar."""
        data = GrammarData(ticket.digest, proof.library, proof.data)
        try:
            guard = self._guard(ticket.spec, proof, grammar)
        except RequestError as error:
            self._refuse(ticket, str(error))
            return
        found = LoadedGrammar(grammar, data, guard)
        self._cache.put(ticket.digest, found, proof.memory_bytes + len(proof.data))
        self._stats.compiled += 1
        ticket.grammar, ticket.done = found, True

    def _guard(
        self, spec: GrammarSpec, proof: Proof, grammar: CompiledGrammar
    ) -> GuardedGrammar | None:
        """What holds the rest of a schema; None: the grammar holds all of it."""
        if not proof.lost:
            return None
        watch = watcher(spec, proof.lost)
        if self._kinds is None:
            self._kinds = TokenKinds(self._ready().loaders.vocabulary)
        return GuardedGrammar(grammar, watch, self._kinds)

    def _refuse(self, ticket: Ticket, reason: str) -> None:
        self._stats.refused += 1
        self._cache.put(ticket.digest, reason, len(reason))
        ticket.fail(RequestError(reason, param=ticket.spec.kind))

    def _lose(self, lost: set[int]) -> None:
        for ticket in [self._owed.pop(i) for i in sorted(lost)]:
            message = "the compiler of grammars ended; try again"
            ticket.fail(RequestError(message, param=ticket.spec.kind, status=503))


def _order(ticket: Ticket) -> Prove:
    spec = ticket.spec
    return Prove(id=ticket.id, kind=spec.kind, text=spec.text, exact=spec.exact)

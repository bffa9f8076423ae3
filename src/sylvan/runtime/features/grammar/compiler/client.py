"""The scheduler's side: asks for proofs, loads what was proved, keeps it."""

from __future__ import annotations

import itertools
import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

import msgspec

from sylvan.config.env import without_settings
from sylvan.protocol.errors import ConfigError, RequestError
from sylvan.runtime.features.grammar.api import CompiledGrammar, GrammarBackend
from sylvan.runtime.features.grammar.cache import GrammarCache
from sylvan.runtime.features.grammar.compiler.loader import IdleLoader
from sylvan.runtime.features.grammar.compiler.messages import (
    Cancel,
    Limits,
    Order,
    Prepare,
    Proof,
    Prove,
    pack,
    read_frame,
)
from sylvan.runtime.features.grammar.compiler.priority import thread_steps_back
from sylvan.runtime.features.grammar.compiler.store import GrammarStore
from sylvan.runtime.features.grammar.spec import GrammarSpec, check_size
from sylvan.runtime.features.grammar.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

_ZYGOTE = "sylvan.runtime.features.grammar.compiler.zygote"
_END_S = 5.0


@dataclass(slots=True, eq=False)
class Ticket:
    """A grammar on its way. Written by the compiler's threads; `done` is set last."""

    spec: GrammarSpec
    digest: str
    id: int
    waiting: int = 0  # requests; kept by the owner of the compiler
    grammar: CompiledGrammar | None = None
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

    backend: GrammarBackend
    vocabulary: Vocabulary
    store: GrammarStore | None = None


@dataclass(slots=True)
class CompilerStats:
    """Counts since the start; `idle_loads`: of `compiled`, those that took no busy core."""

    compiled: int = 0
    refused: int = 0
    timeouts: int = 0
    cache_hits: int = 0
    disk_hits: int = 0
    restarts: int = 0
    idle_loads: int = 0
    compile_s: float = 0.0
    slowest_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Life:
    """One compiling process and what it owes."""

    process: subprocess.Popen[bytes]
    owed: dict[int, Ticket] = field(default_factory=dict)


class GrammarCompiler:
    """Compiles grammars off the thread that asks; each asker waits for its own grammar only.

    `request` and `forget` never block. The process and the threads start with the first grammar
    that is not cached.

    Args:
        name: Of the backend, by which the process finds it.
        setup: Makes what loads grammars; called in the compiler's thread, with the first of them.
        limits: What compiling one grammar may take.
    """

    def __init__(self, name: str, setup: Callable[[], Setup], limits: Limits) -> None:
        self._name, self._make_setup, self._limits = name, setup, limits
        self._setup: Setup | None = None
        self._cache = GrammarCache()
        self._ids = itertools.count(1)
        self._underway: dict[str, Ticket] = {}  # by digest; of the asking thread
        self._orders: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._idle = IdleLoader(self._orders.put)
        self._life: _Life | None = None
        self.stats = CompilerStats()

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
        """End the process and the threads."""
        if self._thread is not None:
            self._orders.put(None)
            self._thread.join(_END_S)
            self._thread = None

    def _from_cache(self, ticket: Ticket) -> bool:
        found = self._cache.get(ticket.digest)
        if found is None:
            return False
        self.stats.cache_hits += 1
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
                order = self._orders.get(timeout=self._idle.patience_s)
            except Empty:
                self._load_overdue()
                continue
            if order is None:
                break
            order()
            self._load_overdue()
        self._idle.close()
        if self._life is not None:
            _end(self._life.process)

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
        if setup.store is not None and self._load_stored(ticket, setup.store):
            return
        if self._life is None or self._life.process.poll() is not None:
            self._life = self._start()
        self._life.owed[ticket.id] = ticket
        self._send(Prove(id=ticket.id, kind=ticket.spec.kind, text=ticket.spec.text))

    def _ready(self) -> Setup:
        if self._setup is None:
            self._setup = self._make_setup()
        return self._setup

    def _load_stored(self, ticket: Ticket, store: GrammarStore) -> bool:
        stored = store.read(ticket.digest)
        if stored is None:
            return False
        try:
            self._keep(ticket, stored)
        except RequestError:  # it is compiled anew
            return False
        self.stats.disk_hits += 1
        return True

    def _cancel(self, ticket: Ticket) -> None:
        if self._life is not None and self._life.owed.pop(ticket.id, None):
            self._send(Cancel(id=ticket.id))

    def _start(self) -> _Life:
        self.stats.restarts += 1
        process = subprocess.Popen(
            [sys.executable, "-m", _ZYGOTE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=without_settings(),
            close_fds=True,
        )
        life = _Life(process)
        threading.Thread(
            target=self._read, args=(life,), name="sylvan-grammar-proofs", daemon=True
        ).start()  # as low as this thread, which starts it
        self._life = life
        words = self._ready().vocabulary
        self._send(
            Prepare(
                backend=self._name,
                tokens=list(words.tokens),
                special=words.special,
                eos_ids=words.eos_ids,
                limits=self._limits,
            )
        )
        return life

    def _send(self, order: Order) -> None:
        assert self._life is not None
        stdin = self._life.process.stdin
        assert stdin is not None
        try:
            stdin.write(pack(order))
            stdin.flush()
        except OSError:  # it has ended; the reader tells those who wait
            logger.warning("the compiler of grammars does not listen")

    def _finish(self, life: _Life, proof: Proof) -> None:
        ticket = life.owed.pop(proof.id, None)
        if ticket is None:
            return  # cancelled
        stats = self.stats
        stats.compile_s += proof.seconds
        stats.slowest_s = max(stats.slowest_s, proof.seconds)
        if proof.reason:
            stats.timeouts += proof.seconds >= self._limits.timeout_s
            self._refuse(ticket, proof.reason)
            return
        setup = self._ready()
        if setup.store is not None:
            setup.store.write(ticket.digest, proof)

        def keep(grammar: CompiledGrammar | None) -> None:
            try:
                self._keep(ticket, proof, grammar)
            except RequestError as error:
                self._refuse(ticket, str(error))

        if not self._idle.lend(setup.backend, proof, keep):
            keep(None)

    def _load_overdue(self) -> None:
        for keep in self._idle.overdue():
            keep(None)

    def _keep(self, ticket: Ticket, proof: Proof, grammar: CompiledGrammar | None = None) -> None:
        """Hand out a grammar, loaded here unless it is given."""
        self.stats.idle_loads += grammar is not None
        if grammar is None:
            grammar = self._ready().backend.load(proof.data)
        self._cache.put(ticket.digest, grammar, proof.memory_bytes)
        self.stats.compiled += 1
        ticket.grammar, ticket.done = grammar, True

    def _refuse(self, ticket: Ticket, reason: str) -> None:
        self.stats.refused += 1
        self._cache.put(ticket.digest, reason, len(reason))
        ticket.fail(RequestError(reason, param=ticket.spec.kind))

    # ---- in the reader's thread, which lives as long as a process

    def _read(self, life: _Life) -> None:
        stdout = life.process.stdout
        assert stdout is not None
        while (frame := read_frame(stdout)) is not None:
            proof = msgspec.msgpack.decode(frame, type=Proof)
            self._orders.put(lambda proof=proof: self._finish(life, proof))
        self._orders.put(lambda: self._lose(life))

    def _lose(self, life: _Life) -> None:
        code = life.process.wait()
        if life.owed:
            logger.error("the compiler of grammars ended with code %s", code)
        for ticket in life.owed.values():
            message = "the compiler of grammars ended; try again"
            ticket.fail(RequestError(message, param=ticket.spec.kind, status=503))
        life.owed.clear()
        _end(life.process)
        if self._life is life:
            self._life = None


def _end(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:
                logger.debug("a pipe of the compiler was broken")
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

"""Loads what was proved without taking a core from the model.

A library without a format of its own compiles again in this process: milliseconds of a core that
the threads of a step would wait for. Here they run only while a core has nothing else to do. Such a
thread must not be kept waiting while it holds the interpreter's lock, or everything would wait with
it; so it is given only to libraries that let go of the lock, and only where the model alone keeps
the cores busy, which sleeps as soon as it waits for the lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

from sylvan.protocol.errors import RequestError
from sylvan.runtime.features.grammar.api import CompiledGrammar, GrammarLoader
from sylvan.runtime.features.grammar.compiler.cores import CoreWatch
from sylvan.runtime.features.grammar.compiler.messages import Proof
from sylvan.runtime.features.grammar.compiler.priority import wait_for_idle_cores

# Then it is loaded by who asked: after this, and so many times what the proof took on idle cores.
_PATIENCE_S, _PROOFS, _MOST_PATIENCE_S = 0.25, 2.0, 5.0
_MOST_BYTES = 1 << 16  # reading more takes the interpreter's lock for too long
_MOST_FOREIGN = 0.35  # of all processor time
_END_S = 2.0

Keep = Callable[[CompiledGrammar | None], None]
"""Takes a grammar; None: it is yet to be loaded."""


@dataclass(slots=True, eq=False)
class _Loan:
    proof: Proof
    keep: Keep
    due_s: float
    void: bool = False


class IdleLoader:
    """A thread that loads on idle cores. All methods are for one other thread.

    Args:
        post: Has a call made in that other thread; called from this one.
        watch: Knows whether other processes keep the cores busy.
    """

    def __init__(
        self, post: Callable[[Callable[[], None]], None], watch: CoreWatch | None = None
    ) -> None:
        self._post = post
        self._watch = watch or CoreWatch()
        self._lent: list[_Loan] = []
        self._queue: SimpleQueue[tuple[GrammarLoader, _Loan] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def patience_s(self) -> float | None:
        """Until `overdue` has something; None: nothing is under way."""
        due_s = min((loan.due_s for loan in self._lent), default=None)
        return None if due_s is None else max(0.0, due_s - time.monotonic())

    def lend(self, loader: GrammarLoader, proof: Proof, keep: Keep) -> bool:
        """Have it loaded, then `keep` called where `post` says; False: that would not be wise."""
        if not (loader.loads_unlocked and proof.on_idle and len(proof.data) <= _MOST_BYTES):
            return False
        if self._watch.busy_with_others() > _MOST_FOREIGN:
            return False
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._work, name="sylvan-grammar-idle", daemon=True
            )
            self._thread.start()
        patience_s = min(_MOST_PATIENCE_S, _PATIENCE_S + _PROOFS * proof.seconds)
        loan = _Loan(proof, keep, time.monotonic() + patience_s)
        self._lent.append(loan)
        self._queue.put((loader, loan))
        return True

    def overdue(self) -> list[Keep]:
        """Those that were not loaded in time; should they be yet, nobody is told."""
        now = time.monotonic()
        late = [loan for loan in self._lent if loan.due_s <= now]
        self._lent = [loan for loan in self._lent if loan.due_s > now]
        for loan in late:
            loan.void = True
        return [loan.keep for loan in late]

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(_END_S)
            self._thread = None

    def _take(self, loan: _Loan, grammar: CompiledGrammar) -> None:
        if not loan.void:
            self._lent.remove(loan)
            loan.keep(grammar)

    # ---- in the thread of its own

    def _work(self) -> None:
        wait_for_idle_cores()
        while (asked := self._queue.get()) is not None:
            loader, loan = asked
            if loan.void:
                continue
            try:
                grammar = loader.load(loan.proof.data)
            except RequestError:
                continue  # whoever loads it when it is due says so
            self._post(lambda loan=loan, grammar=grammar: self._take(loan, grammar))

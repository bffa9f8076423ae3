"""Who proves: a process that runs on idle cores only, and one at low priority where there are none.

Whatever compiling takes of a core that a step of the model needs delays tokens: a fork, a library
that is loaded, the grammar itself. So all of it is done by a process that the system lets run only
while a core has nothing else to do (Linux: SCHED_IDLE). Where no core ever has, it would not run at
all. Then, seen by its silence or because it says so itself, a second process is started that always
gets a small share of the cores, and is ended when nobody has needed it for a while.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from sylvan.runtime.features.grammar.compiler.messages import Cancel, Proof, Prove
from sylvan.runtime.features.grammar.compiler.priority import IDLE_LANE
from sylvan.runtime.features.grammar.compiler.process import ProvingProcess
from sylvan.runtime.features.grammar.wire import Prepare

logger = logging.getLogger(__name__)

SILENCE_S = 3.0
"""An idle core would have let the process give a sign many times."""
_SPARE_S = 60.0  # the second process is kept for so long without work

Post = Callable[[Callable[[], None]], None]


@dataclass(frozen=True, slots=True)
class Answers:
    """What a prover calls, in the thread that calls it."""

    take: Callable[[Proof], None]
    lose: Callable[[set[int]], None]
    """These orders are lost with the process that had them."""


class Provers:
    """Gives orders to processes. All methods are for one thread.

    Args:
        prepare: What a process is told first; called when one is started.
        post: Has a call made in that thread; called from others.
        answers: Where proofs go.
        lanes: Of the processes, in the order in which they are asked; by default those that the
            system has.
    """

    def __init__(
        self,
        prepare: Callable[[], Prepare],
        post: Post,
        answers: Answers,
        lanes: tuple[str, ...] = ("idle", "low") if IDLE_LANE else ("low",),
    ) -> None:
        self._prepare, self._post, self._answers = prepare, post, answers
        self._first, self._last = lanes[0], lanes[-1]
        self._processes: dict[str, ProvingProcess] = {}  # by lane
        self._orders: dict[int, Prove] = {}  # without a proof
        self._muted_s = 0.0  # when the first lane was found silent
        self._used_s = 0.0  # the last lane
        self.starts = 0  # of the first lane
        self.moved = 0  # orders that the first lane had no time for

    @property
    def pids(self) -> list[int]:
        """Of the processes that run."""
        return [process.pid for process in self._processes.values()]

    @property
    def patience_s(self) -> float | None:
        """Until `tend` has something to do; None: nothing is under way."""
        due_s = [at for at in (self._silent_s(), self._spare_s()) if at is not None]
        return max(0.0, min(due_s) - time.monotonic()) if due_s else None

    def prove(self, order: Prove) -> None:
        """Have a grammar proved."""
        self._orders[order.id] = order
        self._give(self._last if self._avoids_first() else self._first, order)

    def cancel(self, order_id: int) -> None:
        """Nobody waits for it any more."""
        if self._orders.pop(order_id, None):
            self._withdraw(order_id)

    def tend(self) -> None:
        """Move what the first lane does not get to; end the last one when it is not needed."""
        now = time.monotonic()
        silent_s, spare_s = self._silent_s(), self._spare_s()
        if silent_s is not None and silent_s <= now:
            self._muted_s = now
            self._move(sorted(self._processes[self._first].owed))
        if spare_s is not None and spare_s <= now:
            spare = self._processes.pop(self._last)
            spare.end()
            spare.wait()

    def close(self) -> None:
        """End all processes."""
        processes = list(self._processes.values())
        self._processes.clear()
        for process in processes:
            process.end()
        for process in processes:
            process.wait()

    # ---- who is asked

    def _avoids_first(self) -> bool:
        """Whether the first lane was found silent, and has been so since."""
        first = self._processes.get(self._first)
        return first is not None and first.heard_s < self._muted_s

    def _silent_s(self) -> float | None:
        """When the first lane has been silent for too long."""
        first = self._processes.get(self._first)
        if first is None or self._first == self._last or first.quiet_since_s is None:
            return None
        return first.quiet_since_s + SILENCE_S

    def _spare_s(self) -> float | None:
        last = self._processes.get(self._last)
        if last is None or self._first == self._last or last.owed:
            return None
        return self._used_s + _SPARE_S

    def _give(self, lane: str, order: Prove) -> None:
        process = self._processes.get(lane)
        if process is None:
            process = self._processes[lane] = self._start(lane)
        process.send(order)
        process.owed.add(order.id)

    def _move(self, order_ids: list[int]) -> None:
        """From the first lane to the last one."""
        self.moved += len(order_ids)
        for order_id in order_ids:
            self._withdraw(order_id)
            self._give(self._last, self._orders[order_id])

    def _withdraw(self, order_id: int) -> None:
        for process in self._processes.values():
            if order_id in process.owed:
                process.owed.discard(order_id)
                process.send(Cancel(id=order_id))  # answered by a sign of life

    # ---- what comes back

    def _start(self, lane: str) -> ProvingProcess:
        self.starts += lane == self._first
        process: ProvingProcess

        def take(proof: Proof) -> None:
            self._post(lambda: self._take(process, proof))

        def lose() -> None:
            self._post(lambda: self._lose(lane, process))

        process = ProvingProcess(lane, self._prepare(), take, lose)
        return process

    def _take(self, process: ProvingProcess, proof: Proof) -> None:
        owed = proof.id in process.owed
        process.owed.discard(proof.id)
        self._used_s = time.monotonic()
        if proof.id not in self._orders:
            return  # cancelled
        if proof.starved:
            if owed:
                self._move([proof.id])
            return
        del self._orders[proof.id]
        self._withdraw(proof.id)  # from whom it was moved to
        self._answers.take(proof)

    def _lose(self, lane: str, process: ProvingProcess) -> None:
        process.end()  # children that it left
        code = process.wait()
        if self._processes.get(lane) is process:
            del self._processes[lane]
            logger.error("the compiler of grammars ended with code %s", code)
        lost = {i for i in process.owed if self._orders.pop(i, None)}
        if lost:
            self._answers.lose(lost)

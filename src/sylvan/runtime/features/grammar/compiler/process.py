"""One process that proves grammars, as the scheduler's process sees it."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

import msgspec

from sylvan.config.env import without_settings
from sylvan.runtime.features.grammar.compiler.messages import Order, Proof, pack
from sylvan.runtime.features.grammar.wire import Prepare, read_frame

logger = logging.getLogger(__name__)

_PROGRAM = "sylvan.runtime.features.grammar.compiler"


class ProvingProcess:
    """A process and the two threads that talk with it, so that whoever asks never waits for it.

    Args:
        lane: What cores it takes: "idle" or "low".
        prepare: What it is told first.
        on_proof: Called with each proof, in a thread of this object.
        on_loss: Called in the same thread once the process is gone, `end` or not.
    """

    def __init__(
        self,
        lane: str,
        prepare: Prepare,
        on_proof: Callable[[Proof], None],
        on_loss: Callable[[], None],
    ) -> None:
        self.owed: set[int] = set()  # orders without a proof; kept by who sends them
        self._on_proof, self._on_loss = on_proof, on_loss
        self._asked_s = self._heard_s = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-m", _PROGRAM, lane],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=without_settings(),
            process_group=0,
        )
        self._orders: SimpleQueue[Order | None] = SimpleQueue()
        self._orders.put(prepare)
        for name, work in (("orders", self._write), ("proofs", self._read)):
            thread = threading.Thread(target=work, name=f"sylvan-grammar-{name}", daemon=True)
            thread.start()  # as low as the thread that starts it

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def heard_s(self) -> float:
        """When it last gave a sign of life, or was started; by `time.monotonic`."""
        return self._heard_s

    @property
    def quiet_since_s(self) -> float | None:
        """Since when it owes something and gives no sign of life; None: it owes nothing."""
        return max(self._heard_s, self._asked_s) if self.owed else None

    def send(self, order: Order) -> None:
        """Give it an order; does not wait until it listens."""
        if not self.owed:
            self._asked_s = time.monotonic()
        self._orders.put(order)

    def end(self) -> None:
        """End it and what it has started: what it is at is of no use any more. Once is enough."""
        if self._process.returncode is not None:
            return  # its number may be another one's by now
        self._orders.put(None)
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            logger.debug("the compiler of grammars had ended")

    def wait(self) -> int:
        """Wait until it is gone; its exit code, below 0 if a signal ended it."""
        return self._process.wait()

    # ---- in threads of its own

    def _write(self) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        try:
            with stdin:
                while (order := self._orders.get()) is not None:
                    stdin.write(pack(order))
                    stdin.flush()
        except OSError:  # it has ended; the reader tells
            logger.debug("the compiler of grammars does not listen")

    def _read(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        with stdout:
            while (frame := read_frame(stdout)) is not None:
                self._heard_s = time.monotonic()
                if frame:  # else it only says that it lives
                    self._on_proof(msgspec.msgpack.decode(frame, type=Proof))
        self._orders.put(None)
        self._on_loss()

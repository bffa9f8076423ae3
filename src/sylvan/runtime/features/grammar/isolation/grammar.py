"""Client side of grammars and matchers that live in other processes."""

from __future__ import annotations

import itertools
import logging
import socket
import weakref
from collections import deque
from collections.abc import Sequence

import msgspec
import numpy as np

from sylvan.protocol.arrays import IntArray
from sylvan.runtime.features.grammar.api import GrammarMatcher
from sylvan.runtime.features.grammar.isolation.messages import (
    State,
    Step,
    receive,
    send,
    send_socket,
)

logger = logging.getLogger(__name__)

ANSWER_S = 10.0
"""Seconds that a server may take to answer; its CPU time limit is far lower."""
MAX_FAULTS = 2
"""Servers that may die at a step of one output."""
_MAX_PENDING = 64  # answers that fit into the socket buffers

_NO_ANSWER = "the grammar library ended on this output, or took too long"
_NO_PROCESS = "the process of this grammar ended"
_NOT_ALIKE = "the grammar library did not accept what its mask allows"


class IsolatedGrammar:
    """See `CompiledGrammar`. Matchers of one grammar must be used by one thread at a time.

    Args:
        control: Connection to the grammar's process, which starts matcher servers.
        library: See `CompiledGrammar`.
        data: What the grammar is loaded from.
    """

    def __init__(self, control: socket.socket, library: str, data: bytes) -> None:
        self.library = library
        self._control, self._data = control, data
        self._numbers = itertools.count(1)
        self._closed: deque[int] = deque()  # deleted matchers; filled by any thread
        self._server: _Connection | None = None
        weakref.finalize(self, control.close)

    def matcher(self) -> GrammarMatcher:
        matcher = IsolatedMatcher(self, next(self._numbers))
        weakref.finalize(matcher, self._closed.append, matcher.number)
        return matcher

    def dump(self) -> bytes:
        return self._data

    def server(self) -> _Connection | None:
        """The running matcher server, or a new one; None: it cannot be started."""
        if self._server is None or self._server.is_lost:
            self._server = self._start()
        return self._server

    def _start(self) -> _Connection | None:
        ours, theirs = socket.socketpair()
        self._closed.clear()
        try:
            with theirs:
                send_socket(self._control, theirs, b"")
        except OSError:
            ours.close()
            return None
        return _Connection(ours, self._closed)


class _Connection:
    """A connection to a matcher server: steps go in, states come back in the same order."""

    def __init__(self, connection: socket.socket, closed: deque[int]) -> None:
        connection.settimeout(ANSWER_S)
        self._socket = connection
        self._closed = closed
        self._stream = connection.makefile("rb")
        self._decoder = msgspec.msgpack.Decoder(State)
        self._pending: deque[IsolatedMatcher] = deque()
        self.is_lost = False
        weakref.finalize(self, connection.close)

    def send(self, matcher: IsolatedMatcher, step: Step) -> None:
        """Send a step. `receive` passes the resulting state to `matcher`."""
        while len(self._pending) >= _MAX_PENDING:
            self.receive()
        if self.is_lost:
            matcher.lose(at_fault=False)
            return
        closed = [self._closed.popleft() for _ in range(len(self._closed))]
        self._pending.append(matcher)
        try:
            send(self._socket, msgspec.structs.replace(step, closed=closed) if closed else step)
        except OSError:  # earlier answers may still be unread; `receive` gets to the end
            logger.debug("a server of a grammar does not listen")

    def receive(self) -> None:
        """Receive the next state; one must be pending."""
        try:
            state = receive(self._stream, self._decoder)
        except OSError:  # timeout
            state = None
        if state is not None:
            self._pending.popleft().take(state)
            return
        logger.warning("a server of a grammar ended")
        self.is_lost = True
        self._stream.close()
        self._socket.close()
        culprit = self._pending.popleft()
        for matcher in {*self._pending} - {culprit}:
            matcher.lose(at_fault=False)
        self._pending.clear()
        culprit.lose(at_fault=True)


class IsolatedMatcher:
    """See `GrammarMatcher`. Knows its mask before it is asked, and accepts without waiting.

    Attributes:
        number: ID of the matcher at servers.
    """

    def __init__(self, grammar: IsolatedGrammar, number: int) -> None:
        self.number = number
        self._grammar = grammar
        self._tokens: list[int] = []  # accepted tokens
        self._connection: _Connection | None = None
        self._expected: deque[int | None] = deque()  # tokens sent in pending steps
        self._state = State()
        self._faults = 0
        self._error = ""

    # ---- for the connection

    def take(self, state: State) -> None:
        """Apply the result of a step."""
        expected = self._expected.popleft()
        self._state = state
        self._error = self._error or state.error
        if expected is not None and state.taken != expected:
            self._error = self._error or _NOT_ALIKE

    def lose(self, *, at_fault: bool) -> None:
        """The server died; was it at a step of this output?"""
        self._connection = None
        self._expected.clear()
        self._faults += at_fault
        if self._faults >= MAX_FAULTS:
            self._error = _NO_ANSWER

    # ---- GrammarMatcher

    def fill_mask(self, row: IntArray) -> bool:
        state = self._wait_for_all()
        if state is not None and not state.mask:
            state = self._ask(Step(self.number, wants_mask=True))
        row[:] = np.frombuffer(state.mask, np.int32) if state is not None else 0
        return True

    @staticmethod
    def fill_masks(
        matchers: Sequence[IsolatedMatcher], bits: IntArray, rows: Sequence[int]
    ) -> None:
        for matcher, row in zip(matchers, rows, strict=True):
            matcher.fill_mask(bits[row])

    def accept(self, token: int) -> bool:
        state, connection = self._wait_for_all(), self._connection
        if state is None or connection is None:
            return False
        if not state.mask:
            return self.accept_all([token]) == 1
        if not state.mask[token >> 3] >> (token & 7) & 1:
            return False
        self._send(connection, Step(self.number, tokens=[token]), expected=1)
        self._tokens.append(token)
        return True

    def accept_all(self, tokens: Sequence[int]) -> int:
        state = self._ask(Step(self.number, tokens=list(tokens))) if tokens else None
        taken = state.taken if state is not None else 0
        self._tokens += tokens[:taken]
        return taken

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            self._ask(Step(self.number, rollback=num_tokens))
            del self._tokens[-num_tokens:]

    def forced(self) -> bytes:
        state = self._wait_for_all()
        return state.forced if state is not None else b""

    def is_accepting(self) -> bool:
        state = self._wait_for_all()
        return state is not None and state.is_accepting

    def is_terminated(self) -> bool:
        state = self._wait_for_all()
        return state is not None and state.is_terminated

    def error(self) -> str:
        return self._error

    # ---- steps

    def _wait_for_all(self) -> State | None:
        """Return the state after everything sent; None: there is an error."""
        while not self._error and (connection := self._open()) is not None:
            if self._wait(connection):
                return self._state
        return None

    def _ask(self, step: Step) -> State | None:
        """Run a step, again if a server dies meanwhile; None: there is an error."""
        while not self._error and (connection := self._open()) is not None:
            self._send(connection, step)
            if self._wait(connection):
                return self._state
        return None

    def _wait(self, connection: _Connection) -> bool:
        """Wait until nothing is pending; False if the server died, or there is an error."""
        while self._expected:
            connection.receive()
        return self._connection is connection and not self._error

    def _open(self) -> _Connection | None:
        """Connect to a server, and replay all tokens."""
        if self._connection is not None and not self._connection.is_lost:
            return self._connection
        self._connection = self._grammar.server()
        if self._connection is None:
            self._error = _NO_PROCESS
            return None
        self._expected.clear()
        tokens = list(self._tokens)
        self._send(self._connection, Step(self.number, tokens=tokens), expected=len(tokens))
        return self._connection

    def _send(self, connection: _Connection, step: Step, expected: int | None = None) -> None:
        self._expected.append(expected)
        connection.send(self, step)

"""The processes of isolated grammars: the fork server, one per grammar, and matcher servers."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from sylvan.protocol.arrays import IntArray
from sylvan.protocol.errors import RequestError
from sylvan.runtime.features.grammar.api import CompiledGrammar, GrammarLoader, GrammarMatcher
from sylvan.runtime.features.grammar.isolation.messages import (
    GrammarLoaded,
    State,
    Step,
    receive,
    receive_socket,
    send,
)
from sylvan.runtime.features.grammar.libraries import make_library
from sylvan.runtime.features.grammar.limits import Limits, limit_memory
from sylvan.runtime.features.grammar.vocabulary import Vocabulary
from sylvan.runtime.features.grammar.wire import Prepare, read_frame, vocabulary_of

logger = logging.getLogger(__name__)

# CPU time; legitimate steps take some hundredths of a millisecond.
STEP_S = 0.25  # limit of one step; exceeding it kills the server
TOKEN_S = 0.002  # added per token: replayed outputs have many
MEAN_S = 0.01  # average over the steps of one output
BURST_S = 1.0  # allowed deficit of an output

_TOO_SLOW = f"the grammar takes more than {MEAN_S * 1e3:g} ms of processor time for a token"


def serve(control: socket.socket) -> None:
    """Run the fork server: load the library, then fork a process per grammar until it closes."""
    with control.makefile("rb", buffering=0) as stream:
        frame = read_frame(stream)
    if frame is None:
        return
    prepare = msgspec.msgpack.decode(frame, type=Prepare)
    vocabulary = vocabulary_of(prepare)
    library = make_library(prepare.backend, vocabulary, prepare.limits.max_states)

    def hold(connection: socket.socket, data: bytes) -> None:
        limit_memory(prepare.limits.memory_bytes)
        compiled = _load(library, prepare.limits, connection, data)
        if compiled is not None:
            server = Server(compiled, vocabulary)
            _fork_for_each(connection, lambda client, _: server.run(client))

    _fork_for_each(control, hold)


def _fork_for_each(control: socket.socket, work: Callable[[socket.socket, bytes], None]) -> None:
    """Fork a process for each received socket; if that fails, close the socket."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps the children
    gc.collect()
    gc.freeze()  # a garbage collection would write to pages shared with children
    while (received := receive_socket(control)) is not None:
        connection, data = received
        with connection, contextlib.suppress(OSError):
            if os.fork():
                continue
            try:
                control.close()
                work(connection, data)
            except BrokenPipeError:
                logger.debug("the engine of a grammar is gone")
            except Exception:
                logger.exception("a process of a grammar failed")
                raise
            finally:
                os._exit(0)  # do not flush or close anything of the parent


def _load(
    library: GrammarLoader, limits: Limits, connection: socket.socket, data: bytes
) -> CompiledGrammar | None:
    """Load this process's grammar, and report to the engine."""
    signal.setitimer(signal.ITIMER_PROF, limits.timeout_s)
    try:
        compiled = library.load(data)
    except RequestError as error:
        send(connection, GrammarLoaded(reason=str(error)))
        return None
    signal.setitimer(signal.ITIMER_PROF, 0)
    send(connection, GrammarLoaded())
    return compiled


class Server:
    """Holds the matchers of one grammar.

    Args:
        compiled: The grammar.
        vocabulary: The model's vocabulary.
    """

    def __init__(self, compiled: CompiledGrammar, vocabulary: Vocabulary) -> None:
        self._compiled = compiled
        self._row = np.zeros(vocabulary.words, np.int32)
        self._eos_ids = vocabulary.eos_ids
        self._outputs: dict[int, _Output] = {}

    def run(self, client: socket.socket) -> None:
        """Answer every `Step` with a `State` until `client` closes."""
        decoder = msgspec.msgpack.Decoder(Step)
        with client.makefile("rb") as stream:
            while (step := receive(stream, decoder)) is not None:
                signal.setitimer(signal.ITIMER_PROF, STEP_S + TOKEN_S * len(step.tokens))
                state = self._take(step)
                signal.setitimer(signal.ITIMER_PROF, 0)
                send(client, state)

    def _take(self, step: Step) -> State:
        for number in step.closed:
            self._outputs.pop(number, None)
        output = self._outputs.get(step.matcher)
        if output is None:
            matcher = self._compiled.matcher()
            output = self._outputs[step.matcher] = _Output(matcher, self._eos_ids)
        return output.take(step, self._row)


class _Output:
    """One matcher, and its remaining CPU time."""

    def __init__(self, matcher: GrammarMatcher, eos_ids: Sequence[int]) -> None:
        self._matcher, self._eos_ids = matcher, eos_ids
        self._left_s = BURST_S

    def take(self, step: Step, row: IntArray) -> State:
        """Run a step; overwrites `row`."""
        if self._left_s < 0:
            return State(error=_TOO_SLOW)
        begun_s = time.process_time()
        matcher = self._matcher
        matcher.rollback(step.rollback)
        taken = matcher.accept_all(step.tokens)
        forced = matcher.forced()
        mask = b"" if forced and not step.wants_mask else self._mask(row)
        accepting, terminated = matcher.is_accepting(), matcher.is_terminated()
        state = State(taken, accepting, terminated, forced, mask, matcher.error())
        earned_s = MEAN_S * max(1, taken)
        self._left_s = min(BURST_S, self._left_s + earned_s + begun_s - time.process_time())
        return state

    def _mask(self, row: IntArray) -> bytes:
        """Return the IDs that the engine may assume to be accepted."""
        if not self._matcher.fill_mask(row):
            row[:] = -1
        bits = row.view(np.uint8)
        for token in self._eos_ids:
            bits[token >> 3] &= ~(1 << (token & 7)) & 0xFF
        return row.tobytes()

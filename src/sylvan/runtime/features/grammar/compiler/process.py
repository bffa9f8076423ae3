"""The compiling process: holds the library and the vocabulary, forks one child for each grammar.

    python -m sylvan.runtime.features.grammar.compiler.process

A child compiles under limits on time and memory, computes the first mask, sends what it got
through a pipe and is gone: whatever a grammar does to a library is done to nobody else, and nothing
is left behind. The scheduler talks on stdin and stdout; when they close, this process ends.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import resource
import selectors
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import IO

import msgspec
import numpy as np

from sylvan.protocol.arrays import IntArray
from sylvan.protocol.errors import RequestError
from sylvan.runtime.features.grammar.api import CompiledGrammar, GrammarBackend, GrammarMatcher
from sylvan.runtime.features.grammar.compiler.pool import (
    NICENESS,
    Cancel,
    CompileOrder,
    Order,
    pack,
)
from sylvan.runtime.features.grammar.counts import check_counts
from sylvan.runtime.features.grammar.guard.relax import compile_guarded
from sylvan.runtime.features.grammar.guard.watcher import watcher
from sylvan.runtime.features.grammar.libraries import make_backend
from sylvan.runtime.features.grammar.limits import Limits, limit_memory
from sylvan.runtime.features.grammar.spec import GrammarSpec, check_depth
from sylvan.runtime.features.grammar.vocabulary import Vocabulary
from sylvan.runtime.features.grammar.wire import Prepare, read_frame, vocabulary_of
from sylvan.runtime.features.grammar.work import CompileResult

logger = logging.getLogger(__name__)

MAX_GRAMMAR_BYTES = 64 << 20
"""Of a compiled grammar that crosses processes."""
_SLACK_S = 2
_FORK_AGAIN_S = 0.1
FORK_PATIENCE_S = 20.0
"""How long a system may have no process to spare before those who wait are told."""
_STEPS = 3  # tokens that are written to see that a grammar can be used
_WALL = 6.0  # times its processor time that a child may take: it waits for cores


@dataclass(slots=True)
class _Child:
    """A grammar being compiled."""

    order: CompileOrder
    pid: int
    pipe: int
    started_s: float
    deadline_s: float
    slow: bool
    data: bytearray = field(default_factory=bytearray)
    reason: str = ""  # set when it is killed
    unwanted: bool = False


class Compiler:
    """One thread, so that forking is safe; everything waits in one place."""

    def __init__(
        self,
        backend: GrammarBackend,
        vocabulary: Vocabulary,
        limits: Limits,
        out: int,
    ) -> None:
        self._backend, self._vocabulary = backend, vocabulary
        self._limits, self._out = limits, out
        self._refused_s = 0.0  # since when the system gives no process; 0: it does
        self._quick: deque[CompileOrder] = deque()
        self._slow: deque[CompileOrder] = deque()
        self._children: dict[int, _Child] = {}  # by pipe
        self._selector = selectors.DefaultSelector()

    def run(self, orders: IO[bytes]) -> None:
        """Serve until `orders` ends, or nobody reads answers. `orders` must be unbuffered."""
        try:
            self._serve(orders)
        except BrokenPipeError:
            logger.debug("nobody reads answers any more")
        self._kill_all()

    def _serve(self, orders: IO[bytes]) -> None:
        decoder = msgspec.msgpack.Decoder(Order)
        self._selector.register(orders, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select(self._patience_s()):
                if key.fileobj is not orders:
                    self._read(self._children[key.fd])
                    continue
                frame = read_frame(orders)
                if frame is None:
                    return
                self._take(decoder.decode(frame))
            self._expire()
            self._start()

    def _take(self, order: Order) -> None:
        if isinstance(order, CompileOrder):
            self._quick.append(order)
        elif isinstance(order, Cancel):
            self._quick = deque(o for o in self._quick if o.id != order.id)
            self._slow = deque(o for o in self._slow if o.id != order.id)
            for child in self._children.values():
                if child.order.id == order.id:
                    child.unwanted = True
                    self._kill(child, "nobody waits for it")

    def _start(self) -> None:
        for queue, slow, lanes in (
            (self._quick, False, self._limits.quick_lanes),
            (self._slow, True, self._limits.slow_lanes),
        ):
            busy = sum(c.slow is slow for c in self._children.values())
            for _ in range(min(lanes - busy, len(queue))):
                try:
                    self._fork(queue[0], slow)
                except OSError as error:
                    self._put_off(error)
                    return
                self._refused_s = 0.0
                queue.popleft()

    def _put_off(self, error: OSError) -> None:
        """The system has no process or no pipe to spare: it may have one soon."""
        now = time.monotonic()
        self._refused_s = self._refused_s or now
        if now - self._refused_s > FORK_PATIENCE_S:
            raise error
        logger.warning("no process for a grammar: %s", error)

    def _fork(self, order: CompileOrder, slow: bool) -> None:
        reader, writer = os.pipe()
        limits = self._limits
        allowed_s = limits.timeout_s if slow else limits.quick_s
        try:
            pid = os.fork()
        except OSError:
            os.close(reader)
            os.close(writer)
            raise
        if pid == 0:
            os.close(reader)
            os.close(self._out)  # who reads it is to see when this process ends
            work = functools.partial(_compile, self._backend, self._vocabulary, order)
            _run(work, order, limits, allowed_s, out=writer)
        os.close(writer)
        now = time.monotonic()
        self._children[reader] = _Child(order, pid, reader, now, now + allowed_s * _WALL, slow)
        self._selector.register(reader, selectors.EVENT_READ)

    def _read(self, child: _Child) -> None:
        part = os.read(child.pipe, 1 << 20)
        if part:
            child.data += part
            return
        self._selector.unregister(child.pipe)
        os.close(child.pipe)
        del self._children[child.pipe]
        _, status = os.waitpid(child.pid, 0)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
            child.reason = child.reason or _TOO_SLOW
        if child.unwanted:  # by now it may be somebody else's to answer
            return
        if child.reason in (_TOO_SLOW, _NO_CORE) and not child.slow:
            self._slow.append(child.order)
        else:
            self._reply(child, status)

    def _reply(self, child: _Child, status: int) -> None:
        reason = child.reason
        if not reason and not (os.WIFEXITED(status) and child.data):
            mib = self._limits.memory_bytes >> 20
            reason = f"the grammar library ended on it; more than {mib} MiB or too deep nesting"
        timed_out = reason in (_TOO_SLOW, _NO_CORE)
        if timed_out:
            reason = f"not compiled within {self._limits.timeout_s:g} s"
        if reason:
            seconds = time.monotonic() - child.started_s
            result = CompileResult(
                id=child.order.id, reason=reason, seconds=seconds, timed_out=timed_out
            )
            frame = pack(result)
        else:
            frame = bytes(child.data)
        _write(self._out, frame)

    def _patience_s(self) -> float | None:
        if self._refused_s:
            return _FORK_AGAIN_S
        if not self._children:
            return None
        due_s = [child.deadline_s for child in self._children.values() if not child.reason]
        return max(0.0, min(due_s) - time.monotonic()) if due_s else None

    def _expire(self) -> None:
        now = time.monotonic()
        for child in self._children.values():
            if child.deadline_s <= now and not child.reason:
                self._kill(child, _NO_CORE)

    def _kill(self, child: _Child, reason: str) -> None:
        child.reason = child.reason or reason
        os.kill(child.pid, signal.SIGKILL)

    def _kill_all(self) -> None:
        for child in self._children.values():
            self._kill(child, "the end")
            os.waitpid(child.pid, 0)


_TOO_SLOW = "too slow"  # its processor time is used up
_NO_CORE = "no core"  # or it sleeps


def _run(
    work: Callable[[], CompileResult],
    order: CompileOrder,
    limits: Limits,
    allowed_s: float,
    out: int,
) -> None:
    """What a child does; it never returns."""
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libraries shout when they die
        _restrict(limits)
        signal.setitimer(signal.ITIMER_PROF, allowed_s)  # of processor time; it ends this process
        _write(out, pack(work()))
        code = 0
    except MemoryError:
        _write(out, pack(CompileResult(id=order.id, reason=_out_of_memory(limits))))
        code = 0
    finally:
        os._exit(code)  # nothing of the parent's may be flushed or closed


def _compile(backend: GrammarBackend, vocabulary: Vocabulary, order: CompileOrder) -> CompileResult:
    before_s, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        spec = GrammarSpec(order.kind, order.text, order.exact)
        check_depth(spec)
        compiled, lost = compile_guarded(spec, lambda s: _compiled(backend, vocabulary, s))
        if lost:
            watcher(spec, lost)
        data = compiled.dump()
    except RequestError as error:
        return CompileResult(id=order.id, reason=str(error))
    except RecursionError:
        return CompileResult(id=order.id, reason=f"{order.kind} is nested too deep")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return CompileResult(
        id=order.id,
        library=compiled.library,
        data=data,
        memory_bytes=max(len(data), grown << 10),
        seconds=time.monotonic() - before_s,
        lost={place: tuple(sorted(keywords)) for place, keywords in lost.items()},
    )


def _compiled(
    backend: GrammarBackend, vocabulary: Vocabulary, spec: GrammarSpec
) -> CompiledGrammar:
    """A grammar that allows something, within all limits.

    Raises:
        RequestError: says why not.
    """
    check_counts(spec)
    compiled = backend.compile(spec)
    matcher = compiled.matcher()
    row = np.zeros(vocabulary.words, np.int32)
    choice = not matcher.fill_mask(row) or bool(row.any())
    reason = matcher.error() or _stuck(matcher, row, vocabulary.eos_ids)
    if not reason and not choice and not matcher.is_accepting():
        reason = "it matches no text at all"
    size = len(compiled.dump())
    if not reason and size > MAX_GRAMMAR_BYTES:
        most = MAX_GRAMMAR_BYTES >> 20
        reason = f"it takes {size >> 20} MiB when compiled; at most {most} are allowed"
    if reason:
        raise RequestError(f"{spec.kind}: {reason}", param=spec.kind)
    return compiled


def _stuck(matcher: GrammarMatcher, row: IntArray, ends: Sequence[int]) -> str:
    """Why an output would hit a limit of the library with its first tokens; empty if it does not.

    Regexes of exponential size are compiled in no time by libraries that make states when they
    come to them.
    """
    for _ in range(_STEPS):
        ids = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        token = next((int(i) for i in ids if i not in ends), None)
        if token is None or not matcher.accept(token) or not matcher.fill_mask(row):
            break
    return matcher.error()


def _restrict(limits: Limits) -> None:
    """Bound what this process may still use."""
    limit_memory(limits.memory_bytes)
    seconds = int(limits.timeout_s) + _SLACK_S  # in case nobody is left to end it
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    signal.alarm(int(limits.timeout_s * _WALL) + _SLACK_S)


def _out_of_memory(limits: Limits) -> str:
    return f"compiling needs more than {limits.memory_bytes >> 20} MiB of memory"


def _write(out: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(out, view) :]


def main() -> None:
    """Take the library and the vocabulary from stdin, then serve."""
    os.nice(max(0, NICENESS - os.nice(0)))
    out = os.dup(1)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)  # libraries print
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.closing(open(0, "rb", buffering=0)) as orders:
        frame = read_frame(orders)
        if frame is None:
            return
        prepare = msgspec.msgpack.decode(frame, type=Prepare)
        vocabulary = vocabulary_of(prepare)
        backend = make_backend(prepare.backend, vocabulary, prepare.limits.max_states)
        sys.stdout.flush()
        gc.collect()
        gc.freeze()  # a collection would write to pages that children share
        Compiler(backend, vocabulary, prepare.limits, out).run(orders)


if __name__ == "__main__":
    main()

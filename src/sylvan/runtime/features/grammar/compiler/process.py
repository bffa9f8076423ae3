"""The compile process: holds the library and the vocabulary, forks one child per grammar.

    python -m sylvan.runtime.features.grammar.compiler.process

A child compiles with limits on time and memory, computes the first mask, and sends the result
through a pipe: whatever a grammar does to the library affects only its child, and nothing
remains. The scheduler talks over stdin and stdout; when they close, this process exits.
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
from sylvan.runtime.features.grammar.guard.watch_factory import watch_factory
from sylvan.runtime.features.grammar.libraries import make_backend
from sylvan.runtime.features.grammar.limits import Limits, limit_memory
from sylvan.runtime.features.grammar.spec import GrammarSpec, check_depth
from sylvan.runtime.features.grammar.vocabulary import Vocabulary
from sylvan.runtime.features.grammar.wire import Prepare, read_frame, vocabulary_of
from sylvan.runtime.features.grammar.work import CompileResult

logger = logging.getLogger(__name__)

MAX_GRAMMAR_BYTES = 64 << 20
"""Limit of a compiled grammar sent between processes, in bytes."""
_SLACK_S = 2
_FORK_AGAIN_S = 0.1
FORK_PATIENCE_S = 20.0
"""Seconds without a free process or pipe after which waiting requests fail."""
_STEPS = 3  # tokens generated to test that a grammar is usable
_WALL = 6.0  # wall time of a child as a multiple of its CPU time: it waits for cores


@dataclass(slots=True)
class _Child:
    """A child compiling a grammar."""

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
    """The single-threaded main loop, so that forking is safe; all waiting happens in one place."""

    def __init__(
        self,
        backend: GrammarBackend,
        vocabulary: Vocabulary,
        limits: Limits,
        out: int,
    ) -> None:
        self._backend, self._vocabulary = backend, vocabulary
        self._limits, self._out = limits, out
        self._refused_s = 0.0  # since when the system has no free process; 0: it does
        self._quick: deque[CompileOrder] = deque()
        self._slow: deque[CompileOrder] = deque()
        self._children: dict[int, _Child] = {}  # by pipe
        self._selector = selectors.DefaultSelector()

    def run(self, orders: IO[bytes]) -> None:
        """Serve until `orders` ends, or answers are no longer read. `orders` must be unbuffered."""
        try:
            self._serve(orders)
        except BrokenPipeError:
            logger.debug("answers are no longer read")
        self._kill_all()

    def _serve(self, orders: IO[bytes]) -> None:
        decoder = msgspec.msgpack.Decoder(Order)
        self._selector.register(orders, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select(self._poll_timeout_s()):
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
                    self._kill(child, "no request waits for it")

    def _start(self) -> None:
        for queue, slow, limit in (
            (self._quick, False, self._limits.max_quick),
            (self._slow, True, self._limits.max_slow),
        ):
            busy = sum(c.slow is slow for c in self._children.values())
            for _ in range(min(limit - busy, len(queue))):
                try:
                    self._fork(queue[0], slow)
                except OSError as error:
                    self._retry_later(error)
                    return
                self._refused_s = 0.0
                queue.popleft()

    def _retry_later(self, error: OSError) -> None:
        """Retry later: the system has no process or pipe available."""
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
            os.close(self._out)  # a reader detects the exit of this process
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
        if child.unwanted:  # may already be reused
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

    def _poll_timeout_s(self) -> float | None:
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


_TOO_SLOW = "too slow"  # its CPU time is used up
_NO_CORE = "no core"  # or it sleeps


def _run(
    work: Callable[[], CompileResult],
    order: CompileOrder,
    limits: Limits,
    allowed_s: float,
    out: int,
) -> None:
    """Run the child; never returns."""
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libraries print when they abort
        _restrict(limits)
        signal.setitimer(signal.ITIMER_PROF, allowed_s)  # CPU time limit; kills this process
        _write(out, pack(work()))
        code = 0
    except MemoryError:
        _write(out, pack(CompileResult(id=order.id, reason=_out_of_memory(limits))))
        code = 0
    finally:
        os._exit(code)  # do not flush or close anything of the parent


def _compile(backend: GrammarBackend, vocabulary: Vocabulary, order: CompileOrder) -> CompileResult:
    before_s, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        spec = GrammarSpec(order.kind, order.text, order.exact)
        check_depth(spec)
        compiled, lost = compile_guarded(spec, lambda s: _compiled(backend, vocabulary, s))
        if lost:
            watch_factory(spec, lost)
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
    """Compile a grammar that allows some output, within all limits.

    Raises:
        RequestError: The reason for the failure.
    """
    check_counts(spec)
    compiled = backend.compile(spec)
    matcher = compiled.matcher()
    row = np.zeros(vocabulary.words, np.int32)
    choice = not matcher.fill_mask(row) or bool(row.any())
    reason = matcher.error() or _early_limit(matcher, row, vocabulary.eos_ids)
    if not reason and not choice and not matcher.is_accepting():
        reason = "it matches no text at all"
    size = len(compiled.dump())
    if not reason and size > MAX_GRAMMAR_BYTES:
        limit = MAX_GRAMMAR_BYTES >> 20
        reason = f"it takes {size >> 20} MiB when compiled; at most {limit} are allowed"
    if reason:
        raise RequestError(f"{spec.kind}: {reason}", param=spec.kind)
    return compiled


def _early_limit(matcher: GrammarMatcher, row: IntArray, ends: Sequence[int]) -> str:
    """Return why an output would reach a library limit within its first tokens; empty if not.

    Libraries that create states lazily compile regexes of exponential size instantly.
    come to them.
    """
    for _ in range(_STEPS):
        ids = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        token = next((int(i) for i in ids if i not in ends), None)
        if token is None or not matcher.accept(token) or not matcher.fill_mask(row):
            break
    return matcher.error()


def _restrict(limits: Limits) -> None:
    """Limit the resources that this process may still use."""
    limit_memory(limits.memory_bytes)
    seconds = int(limits.timeout_s) + _SLACK_S  # in case the parent is gone
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    signal.alarm(int(limits.timeout_s * _WALL) + _SLACK_S)


def _out_of_memory(limits: Limits) -> str:
    return f"compiling needs more than {limits.memory_bytes >> 20} MiB of memory"


def _write(out: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(out, view) :]


def main() -> None:
    """Read the library and the vocabulary from stdin, then serve."""
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
        gc.freeze()  # a garbage collection would write to pages shared with children
        Compiler(backend, vocabulary, prepare.limits, out).run(orders)


if __name__ == "__main__":
    main()

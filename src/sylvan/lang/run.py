"""Runs programs: a single one, or a batch on a limited number of threads."""

from __future__ import annotations

import contextvars
import inspect
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

from sylvan.lang.backends.api import BaseBackend
from sylvan.lang.cancel import CancelScope
from sylvan.lang.context import StateContext
from sylvan.lang.errors import ProgramError
from sylvan.lang.executor import StreamExecutor
from sylvan.lang.progress import ProgressBar
from sylvan.lang.sampling import GenParams
from sylvan.lang.settings import global_config
from sylvan.lang.state import ProgramState
from sylvan.utils.tasks import outcome_of
from sylvan.utils.threads import call_in_thread

MIN_BATCH_THREADS = 96
BATCH_THREADS_PER_CPU = 16
GENERATOR_WINDOW = 200  # concurrent programs of a generator-style batch


@dataclass(frozen=True, slots=True)
class ProgramRun:
    """A program with everything to run it except its arguments."""

    function: Callable[..., Any]
    backend: BaseBackend
    defaults: GenParams
    num_api_spec_tokens: int | None = None
    timeout_s: float | None = None
    stream: bool = False
    use_thread: bool = True
    bound: Mapping[str, Any] = field(default_factory=dict)

    def start(self, arguments: Mapping[str, Any]) -> ProgramState:
        """An empty state."""
        deadline = None if self.timeout_s is None else time.monotonic() + self.timeout_s
        context = StateContext(
            chat_template=self.backend.get_chat_template(),
            arguments=arguments,
            stream=self.stream,
            num_api_spec_tokens=self.num_api_spec_tokens,
            scope=CancelScope(deadline),
        )
        self.backend.begin_program(context)
        pool = global_config.workers if self.use_thread else None
        return ProgramState(StreamExecutor(context, self.backend, self.defaults, pool))


def run_program(job: ProgramRun, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ProgramState:
    """Run a program; with `job.stream`, in its own thread.

    Raises:
        ProgramError: the program read a result that failed.
        Exception: any exception of the program itself.
    """
    kwargs = {**kwargs, **job.bound}
    state = job.start(kwargs)
    if not job.stream:
        _call(job, state, args, kwargs)
        return state

    def follow() -> None:
        outcome = outcome_of(lambda: _call(job, state, args, kwargs))
        if isinstance(outcome, Exception):  # raised when the stream is read
            state.stream_executor.fail(outcome)

    run = contextvars.copy_context().run
    threading.Thread(target=run, args=(follow,), name="sylvan-program", daemon=True).start()
    return state


async def run_program_async(
    job: ProgramRun, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> ProgramState:
    """Run a program, which may be an `async def`, without blocking the event loop."""
    kwargs = {**kwargs, **job.bound}
    if not inspect.iscoroutinefunction(job.function):
        return await call_in_thread(run_program, job, args, kwargs)
    state = job.start(kwargs)
    try:
        state.ret_value = await job.function(state, *args, **kwargs)
    finally:
        state.stream_executor.end()
    await state.async_sync()
    return state


def _call(
    job: ProgramRun, state: ProgramState, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    try:
        result = job.function(state, *args, **kwargs)
        state.ret_value = _finish(result) if inspect.iscoroutine(result) else result
    finally:
        state.stream_executor.end()
    if not job.stream:
        state.sync()
    if global_config.verbosity >= 2:
        sys.stdout.write(state.text() + "\n")


def _finish(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run an `async def` program from plain code."""
    import asyncio  # slow to import, and rarely needed

    return asyncio.run(coroutine)


def batch_threads(num_threads: int | Literal["auto"], num_programs: int) -> int:
    """Number of programs to run at a time.

    Raises:
        ValueError: `num_threads` is neither "auto" nor a positive number.
    """
    if num_threads == "auto":
        num_threads = max(MIN_BATCH_THREADS, BATCH_THREADS_PER_CPU * (os.cpu_count() or 1))
    if not isinstance(num_threads, int) or num_threads < 1:
        raise ValueError(f"num_threads must be 'auto' or at least 1, not {num_threads!r}")
    return min(num_threads, num_programs)


def run_batch(
    job: ProgramRun,
    batch: Sequence[Mapping[str, Any]],
    num_threads: int | Literal["auto"],
    *,
    progress_bar: bool,
    window: int | None = None,
) -> Iterator[ProgramState]:
    """Run the program with each of the arguments; states in the order of `batch`.

    A backend failure does not end the other programs: the state stores the error and raises it when
    read. At most `window` programs run ahead of the last state taken.

    Raises:
        Exception: any exception of a program itself.
    """
    threads = batch_threads(num_threads, len(batch))
    bar = ProgressBar(len(batch)) if progress_bar else None
    try:
        if threads == 1:
            for arguments in batch:
                yield _run_one(job, arguments, bar)
        else:
            yield from _run_parallel(job, batch, threads, bar, window or len(batch))
    finally:
        if bar is not None:
            bar.close()


def _run_parallel(
    job: ProgramRun,
    batch: Sequence[Mapping[str, Any]],
    threads: int,
    bar: ProgressBar | None,
    window: int,
) -> Iterator[ProgramState]:
    executor = ThreadPoolExecutor(threads, thread_name_prefix="sylvan-batch")
    futures: deque[Future[ProgramState]] = deque()
    waiting = iter(batch)
    try:
        for arguments in waiting:
            futures.append(executor.submit(_run_one, job, arguments, bar))
            if len(futures) >= window:
                yield futures.popleft().result()
        while futures:
            yield futures.popleft().result()
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _run_one(
    job: ProgramRun, arguments: Mapping[str, Any], bar: ProgressBar | None
) -> ProgramState:
    kwargs = {**arguments, **job.bound}
    state = job.start(kwargs)
    try:
        _call(job, state, (), kwargs)
    except ProgramError as error:
        state.stream_executor.fail(error)
    finally:
        if bar is not None:
            bar.update()
    return state

"""A running model: the TokenizerManager and the processes or threads behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from sylvan.config import Config
from sylvan.config.checkpoint import model_dir
from sylvan.protocol.messages import Finish
from sylvan.runtime.engine.composition import Build, Scalar
from sylvan.runtime.engine.local import LocalEngine
from sylvan.runtime.engine.process import EarlyScheduler
from sylvan.runtime.engine.progress import Progress
from sylvan.runtime.engine.served import served_facts
from sylvan.runtime.engine.supervisor import Meanwhile, Programs, Supervisor
from sylvan.runtime.engine.text import load_tokenizer, read_chat_template
from sylvan.runtime.tokenizer.manager import TokenizerManager
from sylvan.runtime.tokenizer.types import EdgeLimits, ModelFacts
from sylvan.text.tokenizer import Tokenizer
from sylvan.utils.threads import call_in_thread

ABORT_PATIENCE_S = 2.0
_SPARE_SAMPLES = 1024  # kept beyond those that run or wait: streams that are being read to the end
_DRAINED = Finish(type="abort", message="the server is shutting down", status=503)


class _Backend(Protocol):
    async def close(self) -> None: ...

    def kill(self) -> None: ...


class Runtime:
    """What serves one model, seen from the API process; belongs to one asyncio loop.

    Attributes:
        manager: Where requests go in.
    """

    def __init__(self, manager: TokenizerManager, backend: _Backend) -> None:
        self.manager = manager
        self._backend = backend
        self._closed = False

    @classmethod
    async def start(
        cls,
        config: Config,
        *,
        programs: Programs | None = None,
        build: Build | None = None,
        progress: Progress | None = None,
        meanwhile: Meanwhile | None = None,
        early: EarlyScheduler | None = None,
    ) -> Runtime:
        """Start the processes (or, with `processes: one`, a thread) and wait until all are ready.

        Args:
            config: Secrets in it stay in this process.
            programs: Command lines of the processes, if not the usual ones.
            build: Makes the scheduler of `processes: one`, if not the usual way.
            progress: Told of the bytes that are loaded; None: lines of the log tell of them.
            meanwhile: What the caller has to do in this process; done while others start, if any.
            early: A scheduler process that waits for its orders; else one is started.

        Raises:
            ConfigError: something cannot start; one sentence for the operator.
        """
        if config.processes == "many":
            supervisor = Supervisor(config, programs, progress=progress, early=early)
            return await _start_many(config, supervisor, meanwhile)
        if meanwhile is not None:
            await meanwhile()
        return await _start_one(config, build, progress)

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the children by role; empty if all runs in this process."""
        return self._backend.pids if isinstance(self._backend, Supervisor) else {}

    async def drain(self, deadline_s: float) -> bool:
        """Refuse new requests and wait for the live ones; those left at the deadline are aborted.

        Returns whether all ended by themselves.
        """
        self.manager.line.drain()
        if await self._none_live(deadline_s):
            return True
        self.manager.abort_all(_DRAINED)
        await self._none_live(ABORT_PATIENCE_S)
        return False

    async def close(self) -> None:
        """End the processes and remove sockets, shared memory and directory; idempotent."""
        if self._closed:
            return
        self._closed = True
        self.manager.close()
        await self._backend.close()

    def kill(self) -> None:
        """As `close`, at once and without waiting for anything: for a second Ctrl-C."""
        self._closed = True
        self._backend.kill()

    async def _none_live(self, patience_s: float) -> bool:
        try:
            await asyncio.wait_for(self.manager.line.drained(), patience_s)
        except TimeoutError:
            return False
        return True


async def _start_one(config: Config, build: Build | None, progress: Progress | None) -> Runtime:
    if build is None:
        from sylvan.runtime.engine.build import build_scheduler  # brings torch

        build = partial(build_scheduler, progress=progress)
    tokenizer = await call_in_thread(_chat_tokenizer, config)
    manager = _manager(config, tokenizer)
    backend = LocalEngine(config, tokenizer, build)
    try:
        await backend.start(manager, _facts_of(config, tokenizer))
    except BaseException:
        manager.close()
        await backend.close()
        raise
    return Runtime(manager, backend)


async def _start_many(
    config: Config, supervisor: Supervisor, meanwhile: Meanwhile | None
) -> Runtime:
    try:
        await supervisor.spawn(meanwhile)
        tokenizer = await call_in_thread(_chat_tokenizer, config)
        manager = _manager(config, tokenizer)
        await supervisor.run(manager, _facts_of(config, tokenizer))
    except BaseException:
        await supervisor.close()
        raise
    return Runtime(manager, supervisor)


def _chat_tokenizer(config: Config) -> Tokenizer:
    return load_tokenizer(config, read_chat_template(config))


def _manager(config: Config, tokenizer: Tokenizer) -> TokenizerManager:
    running = config.scheduler.max_running_reqs
    most = config.scheduler.max_waiting_reqs + _SPARE_SAMPLES
    limits = EdgeLimits(
        max_live_samples=most + (running if isinstance(running, int) else 0),
        max_parameter_bytes=config.limits.parameter_bytes,
        stream_interval=config.text.stream_interval,
        seed=config.seed,
    )
    return TokenizerManager(tokenizer, limits)


def _facts_of(config: Config, tokenizer: Tokenizer) -> Callable[[Mapping[str, Scalar]], ModelFacts]:
    path = str(model_dir(config.model))
    return lambda facts: served_facts(config, facts, tokenizer, path)

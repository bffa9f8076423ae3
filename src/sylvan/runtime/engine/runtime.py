"""A running model: the TokenizerManager, and the processes or threads behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Protocol

from sylvan.config import Config
from sylvan.config.checkpoint import model_dir
from sylvan.protocol.messages import Finish
from sylvan.runtime.engine.engine_core import Build, Scalar
from sylvan.runtime.engine.local import LocalEngine
from sylvan.runtime.engine.process import PrewarmedScheduler
from sylvan.runtime.engine.progress import Progress
from sylvan.runtime.engine.roles import Replica, Topology
from sylvan.runtime.engine.served_model import served_model_info
from sylvan.runtime.engine.supervisor import DuringStart, Supervisor
from sylvan.runtime.engine.text import load_tokenizer, read_chat_template
from sylvan.runtime.storage.cipher import tenants_secret
from sylvan.runtime.tokenizer.adapters import Adapters, AdapterSettings
from sylvan.runtime.tokenizer.isolation import CacheIsolation
from sylvan.runtime.tokenizer.manager import TokenizerManager
from sylvan.runtime.tokenizer.media import MediaPreparer
from sylvan.runtime.tokenizer.router import ReplicaRouter
from sylvan.runtime.tokenizer.types import EdgeLimits, ServedModelInfo
from sylvan.text.tokenizer import Tokenizer
from sylvan.utils.threads import call_in_thread

ABORT_PATIENCE_S = 2.0
_SPARE_SAMPLES = 1024  # finished requests, whose clients still read, besides those that run or wait
_SLACK_SAMPLES = 8  # requests that have finished in the scheduler, or are on their way to it
_DRAINED = Finish(type="abort", message="the server is shutting down", status=503)


class Backend(Protocol):
    """Runs schedulers and detokenizers."""

    async def close(self) -> None:
        """Stop them, and clean up; idempotent."""
        ...

    def kill(self) -> None:
        """Stop them at once, without waiting."""
        ...


class Runtime:
    """Serves one model from the API process; belongs to one asyncio loop.

    Attributes:
        manager: Accepts requests.
    """

    def __init__(self, manager: TokenizerManager, backends: Sequence[Backend]) -> None:
        self.manager = manager
        self._backends = tuple(backends)
        self._closed = False

    @classmethod
    async def start(
        cls,
        config: Config,
        *,
        topology: Topology | None = None,
        build: Build | None = None,
        progress: Progress | None = None,
        during_start: DuringStart | None = None,
        prewarmed: PrewarmedScheduler | None = None,
    ) -> Runtime:
        """Start the processes (or, with `processes: one`, a thread) and wait until all are ready.

        Args:
            config: Its secrets stay in this process.
            topology: Number of replicas and, with `processes: many`, their processes.
            build: Builds the scheduler of `processes: one`; default: from the configuration.
            progress: Called with the loaded bytes; None: progress is logged.
            during_start: Work of the caller to run while other processes start, if any do.
            prewarmed: A started scheduler process; None: one is started.

        Raises:
            ConfigError: Something cannot start; one sentence for the operator.
        """
        topology = topology or Topology()
        async with AsyncExitStack() as stack:
            router = ReplicaRouter(topology.num_replicas)
            adapters = Adapters(router, _adapter_settings(config))
            if config.processes == "many":
                supervisor = Supervisor(config, topology, progress=progress, prewarmed=prewarmed)
                stack.push_async_callback(supervisor.close)
                await supervisor.spawn(during_start)
                tokenizer = await call_in_thread(_chat_tokenizer, config)
                await supervisor.run(_replicas(config, tokenizer, router))
                backends: list[Backend] = [supervisor]
            else:
                if during_start is not None:
                    await during_start()
                tokenizer = await call_in_thread(_chat_tokenizer, config)
                backends = []
                for replica in _replicas(config, tokenizer, router):
                    engine = LocalEngine(config, tokenizer, build or _build(progress), replica)
                    stack.push_async_callback(engine.close)
                    await engine.start()
                    backends.append(engine)
            manager = TokenizerManager(
                tokenizer,
                _limits(config, topology),
                router=router,
                adapters=adapters,
                media=MediaPreparer(model_dir(config.model), config.media),
            )
            if (secret := tenants_secret(config.tiers)) is not None:
                manager.isolation = CacheIsolation(secret)
            stack.pop_all()
        return cls(manager, backends)

    @property
    def pids(self) -> dict[str, int]:
        """Process IDs of the children by role; empty if everything runs in this process."""
        supervisors = (each for each in self._backends if isinstance(each, Supervisor))
        return {name: pid for each in supervisors for name, pid in each.pids.items()}

    async def drain(self, deadline_s: float) -> bool:
        """Reject new requests and wait for live ones; abort the rest at the deadline.

        Returns whether all finished by themselves.
        """
        self.manager.router.drain()
        if await self._none_live(deadline_s):
            return True
        self.manager.abort_all(_DRAINED)
        await self._none_live(ABORT_PATIENCE_S)
        return False

    async def close(self) -> None:
        """Stop the processes; remove sockets, shared memory and workspace; idempotent."""
        if self._closed:
            return
        self._closed = True
        self.manager.close()
        if self.manager.media is not None:
            await self.manager.media.close()
        await asyncio.gather(*(backend.close() for backend in self._backends))

    def kill(self) -> None:
        """Stop at once, without waiting: for a second Ctrl-C."""
        self._closed = True
        for backend in self._backends:
            backend.kill()

    async def _none_live(self, patience_s: float) -> bool:
        try:
            await asyncio.wait_for(self.manager.router.drained(), patience_s)
        except TimeoutError:
            return False
        return True


def _build(progress: Progress | None) -> Build:
    from sylvan.runtime.engine.build import build_scheduler  # imports torch

    return partial(build_scheduler, progress=progress)


def _chat_tokenizer(config: Config) -> Tokenizer:
    return load_tokenizer(config, read_chat_template(config))


def _replicas(config: Config, tokenizer: Tokenizer, router: ReplicaRouter) -> list[Replica]:
    path = str(model_dir(config.model))

    def facts_of(facts: Mapping[str, Scalar]) -> ServedModelInfo:
        return served_model_info(config, facts, tokenizer, path)

    return [Replica(client, facts_of) for client in router.clients]


def _adapter_settings(config: Config) -> AdapterSettings:
    if (lora := config.lora) is None:
        return AdapterSettings()
    data_dir = config.server.data_dir
    return AdapterSettings(
        enabled=True,
        base=config.served_model_name or Path(config.model).name,
        allowed_dirs=lora.allowed_dirs,
        state_file=str(Path(data_dir) / "adapters.json") if data_dir else None,
    )


def _limits(config: Config, topology: Topology) -> EdgeLimits:
    running = config.scheduler.max_running_reqs
    per_replica = config.scheduler.max_waiting_reqs + (running if isinstance(running, int) else 0)
    full = per_replica + max(_SLACK_SAMPLES, per_replica // 16)
    holds = config.disagg is not None or config.tiers is not None  # neither running nor waiting
    return EdgeLimits(
        max_unfinished=full if isinstance(running, int) and not holds else None,
        max_live_samples=topology.num_replicas * per_replica + _SPARE_SAMPLES,
        max_parameter_bytes=config.limits.parameter_bytes,
        max_logprobs=config.limits.logprobs,
        stream_interval=config.text.stream_interval,
        seed=config.seed,
    )

"""`sylvan route --processes N`: gateway processes that share a port."""

from __future__ import annotations

import logging
import math
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import msgspec

from sylvan.cli.http import StopSignal
from sylvan.cli.listen import reserve
from sylvan.cli.replicas import Replicas, ReplicaSpec
from sylvan.cli.service import Service, no_reload, on_hangup
from sylvan.config.env import runtime_dir
from sylvan.config.fields import get
from sylvan.config.load import dump
from sylvan.config.route import RouteConfig, RouteLimitsConfig
from sylvan.config.schema import ROUTE
from sylvan.config.values import Secret

logger = logging.getLogger(__name__)

NOUN = "process"


class GatewayProcesses:
    """Starts the processes, keeps them running, and stops them.

    Raises:
        ConfigError: An address cannot be used.
    """

    def __init__(self, config: RouteConfig) -> None:
        self._config = config
        self._front = reserve(config.server)
        self._port: int = self._front.getsockname()[1]

    async def run(self, greet: Callable[[int], None], *, until_eof: bool) -> None:
        """Serve until stopped.

        Args:
            greet: Called with the port once all processes serve.
            until_eof: Stop when stdin ends.

        Raises:
            ConfigError: A process did not start; it has printed the reason.
        """
        config, count = self._config, self._config.processes
        async with AsyncExitStack() as stack:
            stop = stack.enter_context(StopSignal(at_eof=until_eof))
            stack.callback(self._front.close)
            made = tempfile.TemporaryDirectory(prefix="sylvan-", dir=runtime_dir())
            folder = Path(stack.enter_context(made))
            specs = [self._spec(folder, number) for number in range(count)]
            processes = Replicas(specs, folder, _nothing, config.server.drain_s, NOUN)
            stop.before_exit(processes.kill)
            await stack.enter_async_context(processes)
            starting = processes.ready(lambda: len(list(folder.glob("ready-*"))) == count)
            if not await stop.unless_stopped(starting):
                return
            greet(self._port)
            service = Service.from_environment()
            service.ready()
            with on_hangup(no_reload):
                await stop.wait()
            service.stopping()

    def _spec(self, folder: Path, number: int) -> ReplicaSpec:
        config, count = self._config, self._config.processes
        tree = with_secrets(config)
        tree.setdefault("server", {})["port"] = self._port
        limits = divided(config.limits, number, count)
        tree["limits"] = msgspec.to_builtins(limits)
        observe = tree.setdefault("observe", {})
        if config.observe.metrics_port:
            observe["metrics_port"] = config.observe.metrics_port + number
        if config.observe.log_dir is not None:
            observe["log_dir"] = str(Path(config.observe.log_dir) / f"{NOUN}-{number}")
        words = ("route", "--peer", f"{folder}:{number}")
        return ReplicaSpec(number, f"{NOUN} {number}", tree, {}, words)


def divided(limits: RouteLimitsConfig, number: int, count: int) -> RouteLimitsConfig:
    """Return one process's share of the admission limits."""

    def whole(amount: int) -> int:
        return amount // count + (number < amount % count)

    most, rate = limits.max_concurrent, limits.rate_per_s
    return msgspec.structs.replace(
        limits,
        max_concurrent=None if most is None else whole(most),
        queue_size=whole(limits.queue_size),
        rate_per_s=None if rate is None else rate / count,
        connections=max(1, whole(limits.connections)),
        connections_per_address=math.ceil(limits.connections_per_address / count),
    )


def with_secrets(config: RouteConfig) -> dict[str, Any]:
    """Return a configuration with secrets, for a private file."""
    tree = dump(config, defaults=False, schema=ROUTE)
    for path, info in ROUTE.sections.items():
        if info.optional and getattr(config, path) is not None:
            tree.setdefault(path, {})  # the flag is on if it is present
    for path, info in ROUTE.fields.items():
        section, _, leaf = path.rpartition(".")
        if not info.is_secret or (section and get(config, section) is None):
            continue
        value = cast("Secret | Sequence[Secret] | None", get(config, path))
        if not value:
            continue
        node = tree.setdefault(section, {}) if section else tree
        if isinstance(value, Secret):
            node[leaf] = value.reveal()
        else:
            node[leaf] = [secret.reveal() for secret in value]
    return tree


def _nothing(name: str) -> None:
    """Do nothing: an exited process is restarted, and the others notice by themselves."""

"""Runs several servers of one model on this machine, for a gateway."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sylvan.config.env import variable, without_settings
from sylvan.config.load import dump
from sylvan.config.resolve import Resolved
from sylvan.config.schema import SERVE
from sylvan.config.tree import Config
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.engine.restart import Backoff

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
STOP_S = 10.0
"""Seconds beyond `server.drain_s` that a server may take to exit."""
_VISIBLE = {
    "cuda": "CUDA_VISIBLE_DEVICES",
    "rocm": "HIP_VISIBLE_DEVICES",
    "tpu": "TPU_VISIBLE_CHIPS",
}
_PORT = re.compile(r":(\d+)$")


@dataclass(frozen=True, slots=True)
class ReplicaKeys:
    """Random keys with which the gateway authenticates to the servers."""

    client: str
    gateway: str

    @classmethod
    def drawn(cls) -> ReplicaKeys:
        """Generate new keys."""
        return cls(secrets.token_hex(32), secrets.token_hex(32))


class ReservedPort:
    """A local port that only cooperating processes can listen on.

    Connections are refused until one of them listens.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._socket.bind((HOST, 0))
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Release the port."""
        self._socket.close()


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """How one server is started.

    Attributes:
        number: Index, from 0.
        url: Its address.
        settings: Its configuration file.
        environment: Additional environment variables.
        words: Its command line.
    """

    number: int
    url: str
    settings: Mapping[str, Any]
    environment: Mapping[str, str]
    words: Sequence[str] = ("serve",)


def replica_specs(
    given: Config, resolved: Resolved, keys: ReplicaKeys, ports: Sequence[int]
) -> list[ReplicaSpec]:
    """Return one spec per port, in order.

    Args:
        given: Settings as the operator gave them.
        resolved: Settings as resolved for a server with its share of the machine.
        keys: Keys of the gateway.
        ports: Ports of the servers.

    Raises:
        ConfigError: There are not enough devices.
    """
    environments = _devices(resolved.config.device, len(ports))
    specs: list[ReplicaSpec] = []
    for number, port in enumerate(ports):
        tree = dump(given, defaults=False)
        for path, info in SERVE.sections.items():
            if info.optional and getattr(given, path) is not None:
                tree.setdefault(path, {})  # the flag is on if it is present
        tree["server"] = _server_section(given, keys, number, port)
        tree["threads"] = resolved.config.threads
        cache = tree.setdefault("cache", {})
        if resolved.config.device == "cpu" and not {"memory", "max_tokens"} & set(cache):
            cache["memory"] = resolved.config.cache.memory
        if given.kv_events is not None:
            tree["kv_events"].update(_shifted_endpoints(given, number))
        if given.observe.record is not None:
            tree["observe"]["record"] = _folder(given.observe.record, number)
        url = f"http://{HOST}:{port}"
        specs.append(ReplicaSpec(number, url, tree, environments[number]))
    return specs


def _server_section(given: Config, keys: ReplicaKeys, number: int, port: int) -> dict[str, Any]:
    server = given.server
    section: dict[str, Any] = {
        "host": HOST,
        "port": port,
        "api_key": keys.client,
        "gateway_key": keys.gateway,
        "max_body_bytes": server.max_body_bytes,
        "response_store_size": server.response_store_size,
        "drain_s": server.drain_s,
    }
    if server.data_dir is not None:
        section["data_dir"] = _folder(server.data_dir, number)
    return section


def _folder(path: str, number: int) -> str:
    return str(Path(path) / f"replica-{number}")


def _shifted_endpoints(given: Config, number: int) -> dict[str, str]:
    """Return publisher addresses per server: the given ports plus the server's index."""
    assert given.kv_events is not None, "kv_events is configured"
    named = {
        "endpoint": given.kv_events.endpoint,
        "replay_endpoint": given.kv_events.replay_endpoint,
    }
    shifted: dict[str, str] = {}
    for name, endpoint in named.items():
        if endpoint is None:
            continue
        found = _PORT.search(endpoint)
        if found is None:
            message = f"kv_events.{name}: {endpoint!r} needs a port where there are replicas"
            raise ConfigError(message)
        shifted[name] = f"{endpoint[: found.start()]}:{int(found[1]) + number}"
    return shifted


def _devices(kind: str, count: int) -> list[dict[str, str]]:
    """Return environment variables that give each server its own device; CPUs are shared."""
    if kind in ("cpu", "jax"):
        return [{} for _ in range(count)]
    name = _VISIBLE.get(kind)
    visible = [part for part in (variable(name) or "").split(",") if part] if name else []
    if name is None or len(visible) < count:
        where = f"list at least {count} devices in {name}" if name else "choose device=cpu"
        message = f"server.replicas={count}: each server needs a device of its own; {where}"
        raise ConfigError(message)
    return [{name: device} for device in visible[:count]]


class Replicas:
    """Keeps the servers running, one process each; use it as an async context manager.

    A server that exits is restarted at the same address, as `RestartPolicy` allows. Belongs to
    one event loop.

    Args:
        specs: One spec per server.
        folder: Private directory for configuration files.
        on_loss: Called with the address of each server that exited.
        drain_s: Seconds that a server may take to finish its requests at shutdown.
        noun: What messages call a server.
    """

    def __init__(
        self,
        specs: Sequence[ReplicaSpec],
        folder: Path,
        on_loss: Callable[[str], None],
        drain_s: float,
        noun: str = "replica",
    ) -> None:
        self._specs = specs
        self._noun = noun
        self._folder = folder
        self._on_loss = on_loss
        self._patience_s = drain_s + STOP_S
        self._processes: dict[int, Process] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._stillborn: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._started = False

    @property
    def pids(self) -> dict[int, int]:
        """Process IDs by index of the server."""
        return {number: process.pid for number, process in self._processes.items()}

    async def __aenter__(self) -> Replicas:
        for spec in self._specs:
            self._processes[spec.number] = await self._start(spec)
        self._keepers = [asyncio.create_task(self._keep(spec)) for spec in self._specs]
        return self

    async def __aexit__(self, *_: object) -> None:
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await asyncio.gather(*map(self._stop, self._processes.values()))

    async def ready(self, condition: Callable[[], bool], poll_s: float = 0.05) -> bool:
        """Wait until all have started once; return True.

        Raises:
            ConfigError: A server exited before; it has printed the reason.
        """
        while not condition():
            if self._stillborn.done():
                raise ConfigError(self._stillborn.result())
            await asyncio.sleep(poll_s)
        self._started = True
        return True

    def kill(self) -> None:
        """Kill all servers."""
        for process in self._processes.values():
            if process.returncode is None:
                process.kill()

    async def _start(self, spec: ReplicaSpec) -> Process:
        path = self._folder / f"{self._noun}-{spec.number}.json"
        path.touch(mode=0o600)
        path.write_text(json.dumps(spec.settings))
        command = ["-m", "sylvan", *spec.words, "--quiet", "--until-eof", "--share-port"]
        # its own session: this process handles signals to the terminal's group
        return await asyncio.create_subprocess_exec(
            sys.executable,
            *command,
            "--config",
            str(path),
            stdin=PIPE,
            env={**without_settings(), **spec.environment},
            start_new_session=True,
        )

    async def _keep(self, spec: ReplicaSpec) -> None:
        backoff = Backoff()
        while True:
            process = self._processes[spec.number]
            code = await process.wait()
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            if not self._started:
                if not self._stillborn.done():
                    self._stillborn.set_result(f"{self._noun} {spec.number} did not start ({how})")
                return
            logger.error("%s %d exited (%s) pid=%d", self._noun, spec.number, how, process.pid)
            self._on_loss(spec.url)
            delay_s = backoff.next_delay_s()
            if delay_s is None:
                message = "%s %d failed too often; it is not restarted"
                logger.error(message, self._noun, spec.number)
                return
            await asyncio.sleep(delay_s)
            self._processes[spec.number] = await self._start(spec)
            logger.warning("%s %d started again", self._noun, spec.number)

    async def _stop(self, process: Process) -> None:
        if process.returncode is not None:
            return
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), self._patience_s)
        except TimeoutError:
            process.kill()
            await process.wait()

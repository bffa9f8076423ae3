"""Two machines on loopback: node 0 as a runtime, node 1 as an agent on the same event loop."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import msgspec

from sylvan.config import Config
from sylvan.config.tree import ParallelConfig
from sylvan.runtime.engine.node_agent import NodeAgent
from sylvan.runtime.engine.runtime import Runtime
from sylvan.runtime.storage.identity import quick_digest
from tests.support.tiny import tiny_config


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def two_nodes(model: Path, port: int, **changes: object) -> Config:
    """Return the configuration of node 0, with two ranks on two machines; `changes` are of
    `parallel`.
    """
    given: dict[str, object] = {
        "tp": 2,
        "nodes": 2,
        "address": f"127.0.0.1:{port}",
        "backend": "gloo",
        "join_timeout_s": 60.0,
    }
    return tiny_config(model, runner="eager", parallel=ParallelConfig(**(given | changes)))  # type: ignore[arg-type]


def agent_of(
    config: Config, given: dict[str, str] | None = None, digest: str | None = None
) -> NodeAgent:
    """Start node 1 for a node 0 with this configuration."""
    parallel = msgspec.structs.replace(config.parallel, node_rank=1)
    own = msgspec.structs.replace(config, parallel=parallel)
    return NodeAgent(own, given or {}, digest or quick_digest(Path(config.model)))


class Cluster:
    """Both machines, while they serve.

    Attributes:
        runtime: The runtime of node 0.
        agent: Node 1.
        task: The task that runs node 1.
    """

    def __init__(self, config: Config, runtime: Runtime, agent: NodeAgent) -> None:
        self._config, self.runtime, self.agent = config, runtime, agent
        self.task: asyncio.Task[None]

    @classmethod
    async def start(cls, config: Config) -> Cluster:
        agent = agent_of(config)
        task = asyncio.create_task(agent.run())
        made = cls(config, await Runtime.start(config), agent)
        made.task = task
        return made

    async def lose(self) -> None:
        """Stop node 1 and its ranks."""
        self.task.cancel()
        await asyncio.wait([self.task])

    def come_back(self) -> None:
        """Start node 1 again with the same command."""
        self.agent = agent_of(self._config)
        self.task = asyncio.create_task(self.agent.run())

    @property
    def pids(self) -> dict[str, int]:
        """Of both."""
        return {**self.runtime.pids, **self.agent.pids}

    async def close(self) -> None:
        """Stop node 0, and node 1 with it."""
        await self.runtime.close()
        async with asyncio.timeout(60):
            await self.task

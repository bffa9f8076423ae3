"""Servers whose other ranks are threads of this process."""

from __future__ import annotations

import threading

from sylvan.config import Config
from sylvan.kernels.api import Communicator
from sylvan.kernels.collective.reference import thread_ranks
from sylvan.runtime.engine.build import build_rank
from sylvan.runtime.engine.ranks import step_codec
from sylvan.runtime.executor.api import Executor
from sylvan.runtime.executor.ranks import Follower, RankedExecutor
from sylvan.runtime.layers.mesh import Mesh
from sylvan.transport.api import Duplex
from sylvan.transport.inproc import Pipe


class RankThreads:
    """Replaces a `RankGroup`; use runner=eager: step programs share one thread pool."""

    def __init__(self, size: int = 2) -> None:
        self._ranks = thread_ranks(size)
        self._down, self._up = ([Pipe() for _ in range(size - 1)] for _ in range(2))
        self._threads: list[threading.Thread] = []

    def start(self, config: Config) -> Mesh:
        for index, rank in enumerate(self._ranks[1:]):
            follow = threading.Thread(target=self._follow, args=(index, rank, config), daemon=True)
            follow.start()
            self._threads.append(follow)
        return Mesh(self._ranks[0])

    def executor(self, own: Executor, mesh: Mesh) -> Executor:
        others = [Duplex(down, up) for down, up in zip(self._down, self._up, strict=True)]
        return RankedExecutor(own, others, step_codec(), mesh.tp.check)

    def join(self) -> None:
        """Wait until the ranks have ended, which happens when the executor is closed."""
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()

    def _follow(self, index: int, rank: Communicator, config: Config) -> None:
        try:
            executor, close = build_rank(config, Mesh(rank))
            ends = Duplex(self._up[index], self._down[index])
            Follower(executor, ends, step_codec(), rank.check).run()
            close()
        finally:
            rank.close()

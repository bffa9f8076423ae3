"""Several ranks in one process: the first is used like any executor, others are threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from sylvan.kernels.collective.reference import thread_ranks
from sylvan.protocol.errors import RankLostError
from sylvan.runtime.executor.api import Executor
from sylvan.runtime.executor.facts import LoadedModelInfo
from sylvan.runtime.executor.options import LocalOptions
from sylvan.runtime.executor.ranks import Follower, RankedExecutor
from sylvan.runtime.layers.mesh import Mesh
from sylvan.transport.api import Duplex
from sylvan.transport.inproc import Pipe
from tests.parity.serving import build_standard
from tests.support.remote_executor import codec


class ThreadedRanks(RankedExecutor):
    """Ends its threads when it is closed; `lost` is why one of them ended before."""

    threads: list[threading.Thread]
    lost: list[RankLostError]

    def close(self) -> None:
        super().close()
        for thread in self.threads:
            thread.join(30)
            assert not thread.is_alive()


def in_threads(calls):
    """Run calls that wait for each other in threads; return their results, or raise the first
    error.

    Building a model changes torch's default dtype, which threads share: it is restored.
    """
    dtype = torch.get_default_dtype()
    try:
        with ThreadPoolExecutor(len(calls)) as pool:
            return [future.result() for future in [pool.submit(call) for call in calls]]
    finally:
        torch.set_default_dtype(dtype)


def on_ranks(size: int, run):
    """Call `run` with the mesh of each rank, in one thread per rank; return the results."""
    meshes = [Mesh(rank) for rank in thread_ranks(size)]
    return in_threads([lambda mesh=mesh: run(mesh) for mesh in meshes])


def build_ranks(
    size: int, build=build_standard, timeout_s: float = 60.0, mesh_of=Mesh, queued: int = 0
):
    """Return a function like `build_standard` that builds `size` ranks.

    Args:
        size: Number of ranks.
        build: Builds the executor of a rank; called in its thread, with `mesh`.
        timeout_s: Timeout of each collective.
        mesh_of: Builds the mesh of a rank.
        queued: See `Follower`.
    """

    def make(path: Path, options: LocalOptions) -> tuple[Executor, LoadedModelInfo]:
        assert options.runner == "eager", "the native kernels have one pool of threads a process"
        ranks = thread_ranks(size, timeout_s)
        meshes = [mesh_of(rank) for rank in ranks]
        made = in_threads([partial(build, path, options, mesh=mesh) for mesh in meshes])
        down, up = ([Pipe() for _ in range(size - 1)] for _ in range(2))
        others = [Duplex(one, other) for one, other in zip(down, up, strict=True)]
        first, facts = made[0]
        executor = ThreadedRanks(first, others, codec(), ranks[0].check)
        executor.lost, executor.threads = [], []
        for rank, (follower, _) in enumerate(made[1:]):
            ends = Duplex(up[rank], down[rank])
            target = _following(follower, ends, executor.lost, queued)
            thread = threading.Thread(target=target, daemon=True)
            thread.start()
            executor.threads.append(thread)
        return executor, facts

    return make


def _following(executor: Executor, ends: Duplex, lost: list[RankLostError], queued: int):
    def run() -> None:
        try:
            Follower(executor, ends, codec(), lambda: None, queued=queued).run()
        except RankLostError as error:
            lost.append(error)
        finally:
            executor.close()

    return run

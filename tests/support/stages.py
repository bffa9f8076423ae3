"""Pipeline stages in one process: the first is used like any executor, the others are threads."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

from sylvan.kernels.collective.reference import thread_ranks
from sylvan.runtime.executor.api import Executor
from sylvan.runtime.executor.division import check_division
from sylvan.runtime.executor.facts import LoadedModelInfo
from sylvan.runtime.executor.options import LocalOptions
from sylvan.runtime.executor.ranks import Follower
from sylvan.runtime.layers.mesh import Mesh
from sylvan.runtime.layers.placement import ExpertPlacement
from sylvan.runtime.layers.stage import Stage
from sylvan.runtime.models.registry import load_config
from sylvan.transport.api import Duplex
from sylvan.transport.inproc import Pipe
from tests.parity.serving import build_standard
from tests.support.ranks import ThreadedRanks, in_threads
from tests.support.remote_executor import codec


def meshes_of(stages: int, tp: int = 1, ep: int = 1) -> list[Mesh]:
    """Return the meshes by rank."""
    groups = [thread_ranks(tp) for _ in range(stages)]
    links = [[thread_ranks(2) for _ in range(tp)] for _ in range(stages - 1)]
    return [
        Mesh(
            groups[number][place],
            ep,
            ExpertPlacement(ep) if ep > 1 else None,
            stage=Stage(
                number,
                stages,
                before=links[number - 1][place][1] if number else None,
                after=links[number][place][0] if number < stages - 1 else None,
            ),
        )
        for number in range(stages)
        for place in range(tp)
    ]


def build_stages(stages: int, tp: int = 1, build=build_standard, ep: int = 1):
    """Return a function like `build_standard` that builds this many stages of `tp` ranks."""
    size, sampler = stages * tp, (stages - 1) * tp

    def make(path: Path, options: LocalOptions) -> tuple[Executor, LoadedModelInfo]:
        assert options.runner == "eager", "the native kernels have one pool of threads a process"
        meshes = meshes_of(stages, tp, ep)
        check_division(load_config(path), meshes[0])  # as a server does before it starts ranks
        made = in_threads([partial(build, path, options, mesh=mesh) for mesh in meshes])
        down, up = ([Pipe() for _ in range(size - 1)] for _ in range(2))
        others = [Duplex(one, other) for one, other in zip(down, up, strict=True)]
        first, facts = made[0]
        executor = ThreadedRanks(first, others, codec(), meshes[0].check, sampler=sampler)
        executor.lost, executor.threads = [], []
        for rank, (own, _) in enumerate(made[1:], 1):
            ends = Duplex(up[rank - 1], down[rank - 1])
            follower = Follower(own, ends, codec(), lambda: None, samples=rank == sampler)
            thread = threading.Thread(target=_run, args=(follower, own), daemon=True)
            thread.start()
            executor.threads.append(thread)
        return executor, facts

    return make


def _run(follower: Follower, own: Executor) -> None:
    try:
        follower.run()
    finally:
        own.close()

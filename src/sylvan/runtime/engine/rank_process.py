"""The process of a rank other than the first, whose process runs the scheduler.

The supervisor starts it. It holds its shard of the model, and executes the scheduler's steps.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, cast

import msgspec

from sylvan.protocol.errors import ExecutorError, RankLostError
from sylvan.protocol.messages import Alive, Ready
from sylvan.runtime.engine.build import build_rank
from sylvan.runtime.engine.child_main import ChildMain, run_start
from sylvan.runtime.engine.ranks import (
    StartRank,
    follow_mesh,
    rank_channel,
    sampler_of,
    step_codec,
)
from sylvan.runtime.executor.ranks import Follower
from sylvan.transport.api import MessageSender
from sylvan.utils import garbage

logger = logging.getLogger(__name__)

_BEATS_PER_LIMIT = 8
_POLL_S = 0.5


def main() -> int:
    """Execute steps until the first rank or the parent ends this process; return the exit code."""
    child = ChildMain.start()
    replies = cast(Any, child.sender("replies"))
    follower: Follower | None = None
    close: Callable[[], None] = nothing

    def start() -> None:
        nonlocal follower, close
        channel = rank_channel(child)
        while (first := channel.receive(_POLL_S)) is None:
            pass
        assert isinstance(first, StartRank), "a stream begins with the configuration"
        config = first.config
        if child.steps is not None:  # settings of this machine
            own = child.config
            parallel = msgspec.structs.replace(config.parallel, address=own.parallel.address)
            config = msgspec.structs.replace(
                config,
                model=own.model,
                tokenizer=own.tokenizer,
                load_cache=own.load_cache,
                threads=own.threads,
                parallel=parallel,
            )
        mesh = follow_mesh(child, first, config)
        executor, close = build_rank(config, mesh)
        samples = child.rank == sampler_of(mesh)
        check = mesh.check
        queued = 0 if config.device == "cpu" else 1
        steps = cast(Any, channel)
        follower = Follower(executor, steps, step_codec(), check, samples=samples, queued=queued)

    code = run_start(replies, start)
    if follower is not None:
        replies.send(Ready(facts={}))
        interval_s = child.config.parallel.rank_timeout_s / _BEATS_PER_LIMIT
        threading.Thread(target=_beat, args=(replies, interval_s), daemon=True).start()
        code = _follow(follower)
        close()
    else:
        child.finish()
    return code


def nothing() -> None:
    """Clean up nothing."""


def _follow(follower: Follower) -> int:
    garbage.freeze()
    try:
        follower.run()
    except (ExecutorError, RankLostError):
        logger.exception("this rank cannot continue; it exits")
        return 1
    return 0


def _beat(replies: MessageSender[Alive], interval_s: float) -> None:
    """Send heartbeats, however long steps take."""
    pause = threading.Event()
    while not pause.wait(interval_s):
        replies.send(Alive())

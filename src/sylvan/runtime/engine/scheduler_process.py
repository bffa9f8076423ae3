"""The scheduler process, started by the supervisor."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, cast

from sylvan.protocol.errors import ExecutorError, RankLostError
from sylvan.protocol.messages import Ready, ToScheduler
from sylvan.runtime.engine.build import build_scheduler
from sylvan.runtime.engine.child_main import ChildMain, run_start
from sylvan.runtime.engine.composition import Build, EngineCore
from sylvan.runtime.engine.progress import ReportedProgress
from sylvan.runtime.engine.ranks import rank_group
from sylvan.runtime.engine.roles import STEPS
from sylvan.runtime.engine.scheduler_loop import Ports, SchedulerLoop
from sylvan.utils import garbage

logger = logging.getLogger(__name__)


def main(build: Build | None = None) -> int:
    """Serve until the parent exits or shuts it down; return the exit code."""
    child = ChildMain.start()
    replies = cast(Any, child.sender("replies"))
    progress = ReportedProgress(replies.send) if child.reports_loading else None
    ports: Ports | None = None
    built: EngineCore | None = None

    def start() -> None:
        nonlocal ports, built
        inbox = cast(Any, child.receiver(ToScheduler, "inbox", "stops"))
        ports = Ports(inbox, cast(Any, child.sender("text")), replies)
        ranks = rank_group(child, replies.send)
        make = build or partial(build_scheduler, progress=progress, ranks=ranks)
        built = make(child.config, ports.emit)
        built.scheduler.times.log.move_to(child.path(STEPS))

    with garbage.postponed():
        code = run_start(replies, start)
    if ports is not None and built is not None:
        replies.send(Ready(facts=dict(built.facts)))
        code = _serve(SchedulerLoop(built, ports, on_idle=garbage.settle))
        built.close()
    child.finish()
    return code


def _serve(loop: SchedulerLoop) -> int:
    garbage.settle()
    try:
        loop.run()
    except (ExecutorError, RankLostError):
        logger.exception("the executor was lost; this process exits")
        return 1
    return 0

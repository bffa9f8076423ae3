"""The scheduler process, started by the supervisor."""

from __future__ import annotations

import logging
from typing import Any, cast

from sylvan.protocol.errors import ExecutorError, RankLostError
from sylvan.protocol.messages import Ready, ToScheduler
from sylvan.runtime.engine.child_main import ChildMain, run_start
from sylvan.runtime.engine.early_start import early_start
from sylvan.runtime.engine.engine_core import Build, Emit, EngineCore
from sylvan.runtime.engine.progress import ReportedProgress
from sylvan.runtime.engine.roles import STEPS
from sylvan.runtime.engine.scheduler_loop import Ports, SchedulerLoop
from sylvan.utils import garbage

logger = logging.getLogger(__name__)


def main(build: Build | None = None) -> int:
    """Serve until the parent exits or shuts it down; return the exit code."""
    child = ChildMain.start()
    replies = cast(Any, child.sender("replies"))
    ports: Ports | None = None
    built: EngineCore | None = None

    def start() -> None:
        nonlocal ports, built
        inbox = cast(Any, child.receiver(ToScheduler, "inbox", "stops"))
        ports = Ports(inbox, cast(Any, child.sender("text")), replies)
        built = build(child.config, ports.emit) if build else _build(child, ports.emit, replies)
        built.scheduler.times.log.move_to(child.path(STEPS))

    with garbage.gc_paused():
        code = run_start(replies, start)
    if ports is not None and built is not None:
        replies.send(Ready(facts=dict(built.facts)))
        code = _serve(SchedulerLoop(built, ports, on_idle=garbage.freeze))
        built.close()
    child.finish()
    return code


def _build(child: ChildMain, emit: Emit, replies: Any) -> EngineCore:
    if (early := early_start(child.config, emit)) is not None:
        return early
    from sylvan.runtime.engine.build import build_scheduler  # loads torch
    from sylvan.runtime.engine.ranks import rank_group

    progress = ReportedProgress(replies.send) if child.reports_loading else None
    ranks = rank_group(child, replies.send)
    return build_scheduler(child.config, emit, progress=progress, ranks=ranks)


def _serve(loop: SchedulerLoop) -> int:
    garbage.freeze()
    try:
        loop.run()
    except (ExecutorError, RankLostError):
        logger.exception("the executor was lost; this process exits")
        return 1
    return 0

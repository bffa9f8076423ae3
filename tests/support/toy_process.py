"""A child process that only sends heartbeats; run as a program."""

from __future__ import annotations

import os
import time
from typing import Any, cast

from sylvan.protocol.messages import Heartbeat, Ready, SchedulerLoad
from sylvan.runtime.engine.child_main import ChildMain

INTERVAL_S = 0.05


def main() -> None:
    child = ChildMain.start()
    out = cast(Any, child.sender("out"))
    out.send(Ready(facts={"colour": os.environ["TOY_COLOUR"]}))
    while True:
        out.send(Heartbeat(load=SchedulerLoad()))
        time.sleep(INTERVAL_S)


if __name__ == "__main__":
    main()

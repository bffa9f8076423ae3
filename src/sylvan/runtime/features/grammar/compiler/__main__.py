"""Starts a process that proves: takes its place behind everything else before it loads anything.

python -m sylvan.runtime.features.grammar.compiler idle|low
"""

from __future__ import annotations

import importlib
import sys

from sylvan.runtime.features.grammar.compiler.priority import step_back, wait_for_idle_cores


def main(lane: str) -> None:
    """Serve in a lane; see `provers`."""
    if lane == "idle":
        wait_for_idle_cores()
    else:
        step_back()
    # libraries take a good part of a second
    zygote = importlib.import_module("sylvan.runtime.features.grammar.compiler.zygote")
    zygote.serve(idle=lane == "idle")


if __name__ == "__main__":
    main(sys.argv[1])

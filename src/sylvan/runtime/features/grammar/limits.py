"""What compiling one grammar may take, and bounds on processes that run grammar libraries."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path

import msgspec

from sylvan.runtime.features.grammar.api import MAX_STATES

_PAGES = Path("/proc/self/statm")
_OOM_SCORE = Path("/proc/self/oom_score_adj")
_FIRST = "1000"


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What compiling one grammar may take.

    Seconds are of processor time: compiling makes way for whatever else runs, and a busy machine is
    no fault of the grammar's. One that needs more than `quick_s` is stopped and tried again in the
    slow lane, with all of `timeout_s`, so that hard grammars wait for each other and never hold up
    easy ones. States are those of the grammar's automaton, made while it is compiled or later,
    while outputs are written; see `GrammarBackend.grows_later`.
    """

    timeout_s: float = 10.0
    quick_s: float = 1.0
    memory_bytes: int = 1 << 30
    max_states: int = MAX_STATES
    quick_lanes: int = 2
    slow_lanes: int = 1


def limit_memory(num_bytes: int) -> None:
    """Bound what this process may still use; pages that it has do not count.

    Where the machine runs out of memory, this process is ended before others.
    """
    if _PAGES.exists():
        pages = int(_PAGES.read_text().split()[0])
        most = pages * resource.getpagesize() + num_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):
        _OOM_SCORE.write_text(_FIRST)

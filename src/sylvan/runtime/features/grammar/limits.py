"""Limits of compiling a grammar, and of processes that run grammar libraries."""

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
    """Limits of compiling one grammar.

    Seconds are CPU time: compiling has low priority, and a busy machine is
    not the grammar's fault. A compilation that exceeds `quick_s` is stopped and restarted in the
    slow queue with the full `timeout_s`, so that hard grammars wait for each other and never delay
    easy ones. States are those of the grammar's automaton, created at compile time or later,
    during generation; see `GrammarBackend.grows_later`.
    """

    timeout_s: float = 10.0
    quick_s: float = 1.0
    memory_bytes: int = 1 << 30
    max_states: int = MAX_STATES
    max_quick: int = 2
    max_slow: int = 1


def limit_memory(num_bytes: int) -> None:
    """Limit the memory that this process may allocate from now on.

    If the machine runs out of memory, this process is killed first.
    """
    if _PAGES.exists():
        pages = int(_PAGES.read_text().split()[0])
        limit = pages * resource.getpagesize() + num_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):
        _OOM_SCORE.write_text(_FIRST)

"""Process-wide settings of the language (`global_config`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sylvan.lang.pool import WorkerPool


@dataclass(slots=True)
class GlobalConfig:
    """Settings that programs may change.

    `workers` executes the nodes of all programs; replace it to change the number of threads.
    """

    verbosity: int = 0  # 2 prints the text of every finished program
    default_backend: Any = None
    skip_special_tokens_in_output: bool = True
    spaces_between_special_tokens_in_out: bool = True
    enable_precache_with_tracing: bool = True
    enable_parallel_encoding: bool = True
    workers: WorkerPool = field(default_factory=WorkerPool)


global_config = GlobalConfig()

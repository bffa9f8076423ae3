"""`EngineCore`, the result of `build_scheduler`: a scheduler with everything it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sylvan.config import Config
from sylvan.config.parallel import ParallelConfig
from sylvan.protocol.disagg import DisaggLoad
from sylvan.protocol.messages import DEFAULT_VERSION, Inspection, TokenOutput
from sylvan.runtime.executor.api import Executor
from sylvan.runtime.features.lora.adapters import LoraAdapters
from sylvan.runtime.features.speculation.corpus import GivenCorpora
from sylvan.runtime.features.tiers.stores import Stores
from sylvan.runtime.sched.scheduler import Scheduler

Emit = Callable[[Sequence[TokenOutput]], None]
Inspect = Callable[[Inspection], Mapping[str, Any] | None]
Scalar = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class EngineCore:
    """A scheduler, its executor and capabilities, and what the loop around it reports.

    Attributes:
        scheduler: The scheduler, ready for requests.
        facts: Properties for the API process; named as in `ServedModelInfo`.
        state: Returns the body of the answer to GetState.
        inspect: Answers queries about the prefix cache.
        executor: Executes commands between steps.
        close: Closes the executor and frees memory.
        grammar_counts: Returns the grammar fields of `SchedulerLoad`.
        draft_seconds_saved: Returns the seconds saved by drafts.
        weight_version: Version label of the weights.
        lora: LoRA adapters; None: disabled.
        corpora: Corpora to draft from; None: disabled.
        media_counts: Returns the media fields of `SchedulerLoad`.
        bucket_counts: Returns the padding fields of `SchedulerLoad`.
        disagg_load: Returns the load of KV transfers; None without a role.
        stores: Manages the KV store; None: there are no tiers.
        parallel: Settings of ranks; None: the defaults.
    """

    scheduler: Scheduler
    facts: Mapping[str, Scalar]
    state: Callable[[], Mapping[str, Any]]
    inspect: Inspect
    executor: Executor
    close: Callable[[], None]
    grammar_counts: Callable[[], Mapping[str, int | float]] = dict
    media_counts: Callable[[], Mapping[str, int]] = dict
    bucket_counts: Callable[[], Mapping[str, int]] = dict
    disagg_load: Callable[[], DisaggLoad | None] = lambda: None
    draft_seconds_saved: Callable[[], float] = float
    weight_version: str = DEFAULT_VERSION
    lora: LoraAdapters | None = None
    corpora: GivenCorpora | None = None
    stores: Stores | None = None
    parallel: ParallelConfig | None = None


Build = Callable[[Config, Emit], EngineCore]
"""Builds the scheduler of a configuration; raises ConfigError."""

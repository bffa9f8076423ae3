"""What building a model gives to whatever runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sylvan.config import Config
from sylvan.protocol.disagg import DisaggLoad
from sylvan.protocol.messages import DEFAULT_VERSION, Inspection, TokenOutput
from sylvan.runtime.executor.api import Executor
from sylvan.runtime.features.lora.serving import LoraServing
from sylvan.runtime.features.speculation.corpus import GivenCorpora
from sylvan.runtime.features.tiers.stores import Stores
from sylvan.runtime.sched.scheduler import Scheduler

Emit = Callable[[Sequence[TokenOutput]], None]
Inspect = Callable[[Inspection], Mapping[str, Any] | None]
Scalar = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class EngineCore:
    """A scheduler with all its parts.

    Attributes:
        scheduler: Ready to take requests.
        facts: Properties for the API process; named as in `ServedModelInfo`.
        state: Makes the body of the answer to GetState.
        inspect: Answers questions about the prefix cache.
        executor: Takes commands between steps.
        close: Ends the executor and frees memory.
        grammar_counts: Fields of `Load` that tell of grammars.
        drafts_won: Seconds that guesses saved.
        weight_version: Label of the weights.
        lora: Adapters; None: there are none to be served.
        corpora: Texts that are guessed from; None: nothing is.
        media_counts: Fields of `Load` that tell of images, videos and sounds.
        disagg_load: What is told of KV that is handed over; None without a role.
        stores: Of KV below the device's memory; None: there can be none.
    """

    scheduler: Scheduler
    facts: Mapping[str, Scalar]
    state: Callable[[], Mapping[str, Any]]
    inspect: Inspect
    executor: Executor
    close: Callable[[], None]
    grammar_counts: Callable[[], Mapping[str, int | float]] = dict
    media_counts: Callable[[], Mapping[str, int]] = dict
    disagg_load: Callable[[], DisaggLoad | None] = lambda: None
    drafts_won: Callable[[], float] = float
    weight_version: str = DEFAULT_VERSION
    lora: LoraServing | None = None
    corpora: GivenCorpora | None = None
    stores: Stores | None = None


Build = Callable[[Config, Emit], EngineCore]
"""Makes the scheduler of a configuration; raises ConfigError."""

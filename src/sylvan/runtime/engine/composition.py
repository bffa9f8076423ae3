"""What building a model gives to whatever runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from sylvan.config import Config
from sylvan.protocol.messages import Inspection, TokenOutput
from sylvan.runtime.sched.recorded import RecordedScheduler
from sylvan.runtime.sched.scheduler import Scheduler
from sylvan.runtime.tokenizer.types import ModelFacts, Task
from sylvan.text.tokenizer import Tokenizer

Emit = Callable[[Sequence[TokenOutput]], None]
Inspect = Callable[[Inspection], Mapping[str, Any] | None]
Scalar = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Composition:
    """A scheduler with all its parts.

    Attributes:
        scheduler: Ready to take requests.
        facts: What the API process is to know of it; the names are those of `ModelFacts`.
        state: Makes the body of the answer to GetState.
        inspect: Answers questions about the prefix cache.
        close: Ends the executor and frees memory.
    """

    scheduler: Scheduler | RecordedScheduler
    facts: Mapping[str, Scalar]
    state: Callable[[], Mapping[str, Any]]
    inspect: Inspect
    close: Callable[[], None]


Build = Callable[[Config, Emit], Composition]
"""Makes the scheduler of a configuration; raises ConfigError."""


def served_facts(
    config: Config, facts: Mapping[str, Scalar], tokenizer: Tokenizer, path: str
) -> ModelFacts:
    """What the API process knows of the model, from what the scheduler reported."""
    known: dict[str, Scalar] = dict(facts)

    def number(name: str, default: int) -> int:
        value: Scalar = known.pop(name, None)
        return int(value) if value else default

    return ModelFacts(
        model_path=path,
        served_name=config.served_model_name or config.model.rstrip("/").rpartition("/")[2],
        context_len=number("context_len", 1),
        vocab_size=number("vocab_size", tokenizer.vocab_size),
        eos_ids=tokenizer.eos_ids,
        max_total_tokens=number("max_total_tokens", 0),
        page_size=number("page_size", 1),
        max_running_reqs=number("max_running_reqs", 0),
        architecture=str(known.pop("architecture", None) or tokenizer.files.architecture),
        model_type=str(known.pop("model_type", None) or tokenizer.files.model_type),
        task=cast("Task", known.pop("task", None) or "generate"),
        vector_size=number("vector_size", 0),
        extra=known,
    )

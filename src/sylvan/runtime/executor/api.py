"""What the scheduler needs from whatever runs the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from sylvan.runtime.core.step import StepPlan, StepResult


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutorCaps:
    """Facts that the scheduler and configuration checks read.

    `lockstep`: every rank must run every step, so an empty plan is launched too. `num_states`:
    slots of recurrent state, the empty one included; 0 where all layers attend. `drafts`: which
    guesses a step can verify. `max_samples`: rows that a step samples, one for each request and one
    for each guess; 0: as many as there are rows.
    """

    max_batch_tokens: int
    max_running_reqs: int
    lockstep: bool = False
    num_states: int = 0
    both_ways: bool = False  # tokens see those after them: texts are never divided nor cached
    makes_vectors: bool = False  # `EmbedRequest` is served
    pools_all: bool = False  # vectors are made of all tokens: none may come from the cache
    max_samples: int = 0
    draft_chains: bool = False
    draft_trees: bool = False


class Pending(Protocol):
    """A step that is running."""

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self) -> StepResult:
        """Block until the step is done.

        Raises:
            ExecutorError: a device or rank failed; the requests of the step must be aborted.
        """
        ...


class Executor(Protocol):
    """Runs steps one after another, in the order launched."""

    caps: ExecutorCaps

    def launch(self, plan: StepPlan) -> Pending:
        """Start a step without waiting for it.

        Token ids still in flight from earlier steps are resolved by the executor.
        """
        ...

    def close(self) -> None:
        """End helpers and free memory. Nothing may be launched afterwards."""
        ...

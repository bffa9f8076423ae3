"""What the scheduler needs from whatever runs the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from sylvan.runtime.core.req import Batch, StepResult


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutorCaps:
    """Facts the scheduler and config checks read.

    `lockstep`: every rank must run every step, so an empty batch is launched too. `num_states`:
    slots of recurrent state, the empty one included; 0 where all layers attend.
    """

    max_batch_tokens: int
    max_running_reqs: int
    lockstep: bool = False
    num_states: int = 0
    both_ways: bool = False  # tokens see those after them: texts are never divided nor cached
    pools_all: bool = False  # vectors are made of all tokens: none may come from the cache


class Pending(Protocol):
    """A step that is running."""

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self) -> StepResult:
        """Block until the step is done.

        Raises:
            ExecutorError: a device or rank failed; the requests of the batch must be aborted.
        """
        ...


class Executor(Protocol):
    """Runs batches one after another, in the order launched."""

    caps: ExecutorCaps

    def launch(self, batch: Batch) -> Pending:
        """Start a step without waiting for it.

        Token ids still in flight from earlier steps are resolved by the executor.
        """
        ...

    def close(self) -> None:
        """End helpers and free memory. Nothing may be launched afterwards."""
        ...

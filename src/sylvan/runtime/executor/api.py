"""What the scheduler needs from whatever runs the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from sylvan.protocol.commands import CommandResult, ExecutorCommand
from sylvan.runtime.cache.groups import KVGroup
from sylvan.runtime.core.step import StepPlan, StepResult


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutorCaps:
    """Facts that the scheduler and configuration checks read.

    `kv_groups`: memory for keys, values and recurrent states, in the order of page tables; the
    executor of a simulation may have none. `lockstep`: every rank must run every step, so an empty
    plan is launched too. `max_samples`: rows that a step samples, one for each request and one for
    each guess; 0: as many as there are rows. `draft_chains`, `draft_trees`: which guesses a step
    can verify. `tree_paths`: trees of a step are computed path by path (`Draft.rows`), and may have
    so many paths beside the first of each; 0: they are computed as they are.
    """

    max_batch_tokens: int
    max_running_reqs: int
    kv_groups: tuple[KVGroup, ...] = ()
    lockstep: bool = False
    both_ways: bool = False  # tokens see those after them: texts are never divided nor cached
    makes_vectors: bool = False  # `EmbedRequest` is served
    pools_all: bool = False  # vectors are made of all tokens: none may come from the cache
    max_samples: int = 0
    draft_chains: bool = False
    draft_trees: bool = False
    tree_paths: int = 0


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


class PendingCommand(Protocol):
    """A command that is being carried out."""

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self) -> CommandResult:
        """Block until it is carried out, or refused: the result says why."""
        ...


@dataclass(frozen=True, slots=True)
class Carried:
    """Implements `PendingCommand` for one whose result is known."""

    result: CommandResult

    def done(self) -> bool:
        return True

    def wait(self) -> CommandResult:
        return self.result


class Executor(Protocol):
    """Runs steps one after another, in the order launched, and commands between them."""

    caps: ExecutorCaps

    def launch(self, plan: StepPlan) -> Pending:
        """Start a step without waiting for it.

        Token ids still in flight from earlier steps are resolved by the executor.
        """
        ...

    def control(self, command: ExecutorCommand) -> PendingCommand:
        """Start to carry out a command after the steps launched so far.

        The caller has waited for these, and launches none before the command is done.
        """
        ...

    def close(self) -> None:
        """End helpers and free memory. Nothing may be launched afterwards."""
        ...

"""The executor interface: what the scheduler needs from the part that runs the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from sylvan.protocol.commands import CommandResult, ExecutorCommand
from sylvan.runtime.cache.groups import KVGroup
from sylvan.runtime.core.step import StepPlan, StepResult


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutorCaps:
    """Facts that the scheduler and configuration checks read.

    `kv_groups`: memory for keys, values and recurrent states, in page-table order; empty in
    simulations. `lockstep`: every rank must run every step, so an empty plan is launched too.
    `max_samples`: maximum sampled rows per step, one per request and draft token; 0: no limit.
    `draft_chains`, `draft_trees`: the drafts that a step can verify. `tree_paths`: if not 0, trees
    are computed path by path (`Draft.rows`), with at most this many paths beyond the first of each.
    `stages`: pipeline stages; with several, no token of a step in flight can be resolved.
    `attention_dp`: groups of ranks that have the KV of different requests, each in memory of
    `kv_groups`; plans number the pages of all groups in one row (`KVGroup.first`).
    """

    max_batch_tokens: int
    max_running_reqs: int
    kv_groups: tuple[KVGroup, ...] = ()
    lockstep: bool = False
    bidirectional: bool = False  # bidirectional attention: prompts are neither chunked nor cached
    makes_vectors: bool = False  # computes embeddings or scores (`EmbedRequest`)
    pools_all: bool = False  # pooling reads all tokens, so none may come from the cache
    fills: bool = False  # generates by block diffusion; prompts are not cached
    max_samples: int = 0
    draft_chains: bool = False
    draft_trees: bool = False
    tree_paths: int = 0
    stages: int = 1
    attention_dp: int = 1


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
    """A running command."""

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self) -> CommandResult:
        """Block until the command has run or was rejected; the result says which."""
        ...


@dataclass(frozen=True, slots=True)
class FinishedCommand:
    """A `PendingCommand` whose result is known."""

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
        """Start a command after all steps launched so far.

        The caller must have waited for these steps, and must not launch another one before the
        command is done.
        """
        ...

    def close(self) -> None:
        """Stop threads and processes, and free memory. Launch nothing afterwards."""
        ...

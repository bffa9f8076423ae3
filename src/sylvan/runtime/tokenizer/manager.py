"""The edge between clients and processes: prompts in, streams of samples out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from sylvan.protocol.messages import Command, ControlReply, Load
from sylvan.runtime.tokenizer.types import GenerateInput, ModelFacts, SampleDelta, State
from sylvan.text.tokenizer import Tokenizer


class TokenizerManager:
    """Checks and tokenises what clients ask for, and streams out what the processes answer.

    Lives in the API process, on one asyncio loop; no method may be called from another thread.

    Attributes:
        facts: About the model; valid once `ready`.
        tokenizer: Of the model; safe to share between threads.
    """

    facts: ModelFacts
    tokenizer: Tokenizer

    async def generate(self, inp: GenerateInput) -> AsyncIterator[SampleDelta]:
        """Yield what is new of each of the `n` samples, interleaved, until all have finished.

        Closing the iterator (or cancelling the task that reads it) aborts the request. Deltas that
        the reader leaves unread are merged, so a slow reader costs no memory. Use
        `contextlib.aclosing` around it.

        Raises:
            RequestError: on the first step, if the request cannot be served at all.
            CapacityError: on the first step, if too much is going on, or nothing is served now.
        """
        raise NotImplementedError
        yield SampleDelta(rid="")

    def abort(self, rid: str) -> bool:
        """End the live request of that name; its stream yields a finish of type abort.

        Returns whether there was one.
        """
        raise NotImplementedError

    def abort_all(self) -> int:
        """End every live request; returns how many there were."""
        raise NotImplementedError

    async def tokenize(
        self, text: str, *, add_special_tokens: bool = True, trusted: bool = True
    ) -> list[int]:
        """Token ids of a text; long texts do not hold up the event loop."""
        raise NotImplementedError

    async def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids.

        Raises:
            RequestError: an id is outside the vocabulary.
        """
        raise NotImplementedError

    async def control(self, command: Command, *, timeout_s: float = 30.0) -> ControlReply:
        """Have the scheduler carry out a command (FlushCache, GetState, Pause, Resume).

        Raises:
            CapacityError: the scheduler did not answer in time.
        """
        raise NotImplementedError

    @property
    def state(self) -> State:
        """What the processes are doing as a whole."""
        raise NotImplementedError

    def load(self) -> Load:
        """How busy the scheduler was at its last heartbeat."""
        raise NotImplementedError

    def heartbeat_age_s(self) -> float:
        """Seconds since the scheduler last showed life; infinite before the first time."""
        raise NotImplementedError

    def alive(self) -> bool:
        """Whether the children run, or are being restarted: the answer of /live."""
        raise NotImplementedError

    def ready(self) -> bool:
        """Whether requests are admitted now: the answer of /ready and, by heartbeat, /health."""
        raise NotImplementedError

    @property
    def num_live(self) -> int:
        """Requests that have not finished; their samples are not counted."""
        raise NotImplementedError

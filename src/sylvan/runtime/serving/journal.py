"""Records one call of a gateway, so that another server can continue it.

See `sylvan.protocol.journal`. The engine's output for the call is recorded here on its way to
the handler. If another server has sent part of the answer, the engine continues from its output;
the handler rebuilds the whole answer, and what the client already has is
dropped.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import msgspec

from sylvan.protocol.errors import RequestError
from sylvan.protocol.journal import RESUME_HEADER, JournalTicket, ResumeFrom, Totals
from sylvan.protocol.messages import Finish, Timing, TokenLogprobs, Usage
from sylvan.runtime.tokenizer.types import GenerateInput, SampleDelta
from sylvan.transport.api import MessageError
from sylvan.transport.codec import MessageDecoder, MessageEncoder

JOURNAL_KEY = "sylvan.journal"
"""Key in the ASGI scope of a call with a journal."""
_SEED_STEP = 0x9E3779B97F4A7C15  # separates the seeds of prompts
_SEED_MASK = 2**63 - 1


class Entry(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A serialised `SampleDelta` of one prompt of a call."""

    prompt: int
    index: int
    text: str
    token_ids: tuple[int, ...]
    usage: Usage
    finish: Finish | None = None
    timing: Timing | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    weight_versions: tuple[str, ...] = ()

    @classmethod
    def of(cls, prompt: int, delta: SampleDelta) -> Entry:
        """Serialise a delta."""
        return cls(
            prompt=prompt,
            index=delta.index,
            text=delta.text,
            token_ids=delta.token_ids,
            usage=delta.usage,
            finish=delta.finish,
            timing=delta.timing,
            logprobs=delta.logprobs,
            prompt_logprobs=delta.prompt_logprobs,
            weight_versions=delta.weight_versions,
        )

    def delta(self) -> SampleDelta:
        """Deserialise the delta; its request ID is not set."""
        return SampleDelta(
            rid="",
            index=self.index,
            text=self.text,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            usage=self.usage,
            finish=self.finish,
            timing=self.timing,
            weight_versions=self.weight_versions,
        )


class CallJournal(Protocol):
    """The interface between a handler and the engine."""

    @property
    def resumes(self) -> bool:
        """Whether another server started the call."""
        ...

    def past(self, inputs: Sequence[GenerateInput]) -> Iterable[tuple[int, SampleDelta]]:
        """The output of that server, in order, each with its prompt index."""
        ...

    def pinned(self, inputs: Sequence[GenerateInput]) -> Sequence[GenerateInput]:
        """Return the inputs, with seeds and past output set."""
        ...

    def note(self, prompt: int, delta: SampleDelta) -> None:
        """Record a delta that the handler streams."""
        ...

    def count(self, prompt: int, delta: SampleDelta) -> None:
        """Record a delta that the handler adds to a whole answer."""
        ...


class NoJournal:
    """The journal of a call that does not come from a gateway."""

    resumes = False

    def past(self, inputs: Sequence[GenerateInput]) -> Iterable[tuple[int, SampleDelta]]:
        return ()

    def pinned(self, inputs: Sequence[GenerateInput]) -> Sequence[GenerateInput]:
        return inputs

    def note(self, prompt: int, delta: SampleDelta) -> None:
        pass

    def count(self, prompt: int, delta: SampleDelta) -> None:
        pass


class Journal:
    """The journal of a call with a ticket.

    Attributes:
        ticket: Inputs of the answer besides the request.

    Raises:
        RequestError: The client's journal is malformed.
    """

    def __init__(self, ticket: JournalTicket, resume: ResumeFrom | None = None) -> None:
        self.ticket = ticket
        self._past = _read(resume.entries) if resume else []
        self._skip = resume.num_frames if resume else 0
        self._num_inputs = 0
        self._consumed = 0
        self._unsent: list[Entry] = []
        self._usages: dict[tuple[int, int], Usage] = {}
        self._encode = MessageEncoder().encode
        self._numbers = itertools.count()

    @property
    def resumes(self) -> bool:
        return bool(self._past)

    def past(self, inputs: Sequence[GenerateInput]) -> Iterable[tuple[int, SampleDelta]]:
        if any(not 0 <= entry.prompt < len(inputs) for entry in self._past):
            message = "The journal has more prompts than the request."
            raise RequestError(message, param=RESUME_HEADER)
        for entry in self._past:
            rid = inputs[entry.prompt].rid or ""
            yield entry.prompt, msgspec.structs.replace(entry.delta(), rid=rid)

    def pinned(self, inputs: Sequence[GenerateInput]) -> Sequence[GenerateInput]:
        first = self._num_inputs
        self._num_inputs += len(inputs)
        return [self._pinned(first + i, inp) for i, inp in enumerate(inputs)]

    def _pinned(self, prompt: int, inp: GenerateInput) -> GenerateInput:
        ticket = self.ticket
        left_s = inp.options.deadline_s
        if left_s is not None:
            left_s = max(left_s - ticket.elapsed_s, 0.001)
        return msgspec.structs.replace(
            inp,
            rid=inp.rid or f"{ticket.name}-{prompt}",
            default_seed=(ticket.seed + prompt * _SEED_STEP) & _SEED_MASK,
            past=self._past_of(prompt),
            options=msgspec.structs.replace(inp.options, deadline_s=left_s),
        )

    def _past_of(self, prompt: int) -> tuple[SampleDelta, ...] | None:
        if not self._past:
            return None
        return tuple(entry.delta() for entry in self._past if entry.prompt == prompt)

    def note(self, prompt: int, delta: SampleDelta) -> None:
        self.count(prompt, delta)
        self._consumed += 1
        if self._consumed > len(self._past):
            self._unsent.append(Entry.of(prompt, delta))

    def count(self, prompt: int, delta: SampleDelta) -> None:
        self._usages[prompt, delta.index] = delta.usage

    def is_new(self) -> bool:
        """Whether the chunk that the handler just made is new to the client."""
        if self._consumed != len(self._past):
            return self._consumed > len(self._past)
        if self._skip:
            self._skip -= 1
            return False
        return True

    def take(self) -> bytes:
        """Return the entries recorded since the last call."""
        if not self._unsent:
            return b""
        entries, self._unsent = self._unsent, []
        return self._encode(entries)

    def totals(self) -> Totals:
        """Sum the token counts; the prompt that samples share counts once."""
        prompts = {prompt: usage for (prompt, _), usage in self._usages.items()}
        return Totals(
            prompt_tokens=sum(usage.prompt_tokens for usage in prompts.values()),
            completion_tokens=sum(u.completion_tokens for u in self._usages.values()),
            cached_tokens=sum(usage.cached_tokens for usage in prompts.values()),
        )

    def ids(self, num_bytes: int) -> str:
        """Return the next ID in hex: the same on every server with the ticket."""
        text = f"{self.ticket.name}/{next(self._numbers)}"
        return hashlib.blake2b(text.encode(), digest_size=num_bytes).hexdigest()

    def wall(self, clock: Callable[[], float]) -> Callable[[], float]:
        """Return the ticket's wall-clock time."""
        began = clock()
        return lambda: self.ticket.created + self.ticket.elapsed_s + clock() - began


def _read(parts: Sequence[bytes]) -> list[Entry]:
    decoder: MessageDecoder[Any] = MessageDecoder(list[Entry])
    try:
        return [entry for part in parts for entry in decoder.decode(part)]
    except MessageError as error:
        raise RequestError(f"The journal is malformed: {error}", param=RESUME_HEADER) from error

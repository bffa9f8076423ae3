"""One call of a gateway, kept such that another server can go on with it.

See `sylvan.protocol.journal`. What the engine gives out for the call is noted here, on its way to
the handler. If some of it was given out by another server before, the engine starts with that; the
handler makes of it what the other server's handler made, which is dropped up to where the client
is.
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
"""Of the ASGI scope of a call that has one."""
_SEED_STEP = 0x9E3779B97F4A7C15  # keeps the seeds of prompts apart
_SEED_MASK = 2**63 - 1


class Entry(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A `SampleDelta` of one of the prompts of a call."""

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
        """Write down a delta."""
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
        """What was written down; its rid is yet to be set."""
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
    """What stands between a handler and the engine."""

    @property
    def resumes(self) -> bool:
        """Whether another server began to serve the call."""
        ...

    def past(self, inputs: Sequence[GenerateInput]) -> Iterable[tuple[int, SampleDelta]]:
        """What that server gave out, in order, each with the index of its prompt."""
        ...

    def pinned(self, inputs: Sequence[GenerateInput]) -> Sequence[GenerateInput]:
        """The inputs as they are to be served."""
        ...

    def note(self, prompt: int, delta: SampleDelta) -> None:
        """The handler was given a delta, of which it makes a part of a stream."""
        ...

    def count(self, prompt: int, delta: SampleDelta) -> None:
        """The handler was given a delta, of which it makes a part of a whole answer."""
        ...


class NoJournal:
    """That of a call which did not come from a gateway."""

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
    """That of a call with a ticket.

    Attributes:
        ticket: What the answer is made from besides the request.

    Raises:
        RequestError: The journal so far is malformed.
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
        """Whether the chunk that the handler has just made is new to the client."""
        if self._consumed != len(self._past):
            return self._consumed > len(self._past)
        if self._skip:
            self._skip -= 1
            return False
        return True

    def take(self) -> bytes:
        """Entries that were noted since the last time."""
        if not self._unsent:
            return b""
        entries, self._unsent = self._unsent, []
        return self._encode(entries)

    def totals(self) -> Totals:
        """Tokens so far; the prompt that samples share counts once."""
        prompts = {prompt: usage for (prompt, _), usage in self._usages.items()}
        return Totals(
            prompt_tokens=sum(usage.prompt_tokens for usage in prompts.values()),
            completion_tokens=sum(u.completion_tokens for u in self._usages.values()),
            cached_tokens=sum(usage.cached_tokens for usage in prompts.values()),
        )

    def ids(self, num_bytes: int) -> str:
        """The next name, in hexadecimal digits: the same in every server that has the ticket."""
        text = f"{self.ticket.name}/{next(self._numbers)}"
        return hashlib.blake2b(text.encode(), digest_size=num_bytes).hexdigest()

    def wall(self, clock: Callable[[], float]) -> Callable[[], float]:
        """The time of day as the ticket has it."""
        began = clock()
        return lambda: self.ticket.created + self.ticket.elapsed_s + clock() - began


def _read(parts: Sequence[bytes]) -> list[Entry]:
    decoder: MessageDecoder[Any] = MessageDecoder(list[Entry])
    try:
        return [entry for part in parts for entry in decoder.decode(part)]
    except MessageError as error:
        raise RequestError(f"The journal is malformed: {error}", param=RESUME_HEADER) from error

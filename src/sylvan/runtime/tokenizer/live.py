"""Requests that are being answered: what was given to the client, and what it has not read yet."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np

from sylvan.protocol.messages import Finish, TextOutput, Timing, TokenLogprobs, Usage
from sylvan.protocol.requests import GenerateRequest, Request
from sylvan.runtime.tokenizer.names import internal_name
from sylvan.runtime.tokenizer.types import SampleDelta

SUSPECT_AFTER = 2  # losses after which a sample is replayed alone
MAX_LOST_LIVES = 3  # losses after which it is given up


@dataclass(slots=True, eq=False)
class Unread:
    """What arrived for a sample since the client last took something."""

    texts: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: TokenLogprobs | None = None
    embedding: np.ndarray | None = None

    def add(self, part: TextOutput) -> None:
        """Append what a step brought."""
        if part.text:
            self.texts.append(part.text)
        self.ids.extend(part.output.token_ids)
        if part.output.logprobs is not None:
            self.logprobs.append(part.output.logprobs)
        if part.output.prompt_logprobs is not None:
            self.prompt_logprobs = part.output.prompt_logprobs
        if part.output.embedding is not None:
            self.embedding = part.output.embedding


@dataclass(slots=True, eq=False)
class Sample:
    """One of the samples of a request.

    Attributes:
        request: As it was submitted first; never changes.
        name: What the processes call it in this epoch.
        output_ids: All ids that arrived so far, read by the client or not.
        lost_lives: How often a process was lost while it was being served.
        finish: Why it ended, once it has.
        taken: The client has been given the finish.
    """

    request: Request
    name: str
    output_ids: list[int] = field(default_factory=list)
    lost_lives: int = 0
    usage: Usage = Usage()  # noqa: RUF009 - immutable
    finish: Finish | None = None
    timing: Timing | None = None
    aborting: Finish | None = None
    has_prompt_logprobs: bool = False
    started: bool = False
    taken: bool = False
    unread: Unread = field(default_factory=Unread)

    def accept(self, part: TextOutput) -> None:
        """Take in what a step brought."""
        if part.output.prompt_logprobs is not None:
            if self.has_prompt_logprobs:  # a replay brought them again
                output = msgspec.structs.replace(part.output, prompt_logprobs=None)
                part = msgspec.structs.replace(part, output=output)
            self.has_prompt_logprobs = True
        self.unread.add(part)
        self.output_ids.extend(part.output.token_ids)
        self.usage = self._merged(part.output.usage)
        if part.output.finish is not None:
            self.finish, self.timing = part.output.finish, part.output.timing

    def end(self, finish: Finish) -> None:
        """End it here, without the processes."""
        if self.finish is None:
            self.finish = finish
            self.usage = msgspec.structs.replace(
                self.usage,
                prompt_tokens=len(self.request.input_ids),
                completion_tokens=len(self.output_ids),
            )

    @property
    def index(self) -> int:
        """Which of the samples of its request, from 0."""
        return self.request.sample if isinstance(self.request, GenerateRequest) else 0

    def replay(self, epoch: int, waited_s: float) -> Request:
        """The request for what is still missing, under a name of its own."""
        request = self.request
        self.name = internal_name(request.rid, self.index, epoch)
        left_s = None if request.deadline_s is None else max(request.deadline_s - waited_s, 0.001)
        if not isinstance(request, GenerateRequest):
            return msgspec.structs.replace(request, rid=self.name, deadline_s=left_s)
        logprobs = request.logprobs
        if logprobs is not None and self.has_prompt_logprobs:
            logprobs = msgspec.structs.replace(logprobs, start=None)
        return msgspec.structs.replace(
            request,
            rid=self.name,
            output_ids=np.array(self.output_ids, np.int32),
            logprobs=logprobs,
            deadline_s=left_s,
        )

    def is_due(self, interval: int) -> bool:
        """Whether the client should be given something now."""
        if self.taken:
            return False
        count = len(self.unread.ids)
        return self.finish is not None or count >= interval or (count > 0 and not self.started)

    def take(self, rid: str) -> SampleDelta:
        """All that is unread, as one delta."""
        unread, self.unread = self.unread, Unread()
        self.started, self.taken = True, self.finish is not None
        return SampleDelta(
            rid=rid,
            index=self.index,
            text="".join(unread.texts),
            token_ids=tuple(unread.ids),
            logprobs=_joined(unread.logprobs),
            prompt_logprobs=unread.prompt_logprobs,
            usage=self.usage,
            finish=self.finish,
            timing=self.timing,
            embedding=unread.embedding,
        )

    def _merged(self, usage: Usage) -> Usage:
        if not self.lost_lives:
            return usage
        # what the client was told before the loss stays true
        return msgspec.structs.replace(
            usage,
            cached_tokens=self.usage.cached_tokens if self.output_ids else usage.cached_tokens,
            retractions=max(usage.retractions, self.usage.retractions),
        )


@dataclass(slots=True, eq=False)
class LiveRequest:
    """The samples of one request, and who waits for them.

    `interval`: ids per delta; None gives each sample as one delta, at its end.
    """

    rid: str
    samples: list[Sample]
    interval: int | None
    arrived_s: float
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def tenant(self) -> str:
        """Whose it is."""
        return self.samples[0].request.tenant

    @property
    def done(self) -> bool:
        """Whether the client was given everything."""
        return all(sample.taken for sample in self.samples)

    def unfinished(self) -> Iterator[Sample]:
        """Samples that have not ended."""
        return (sample for sample in self.samples if sample.finish is None)

    def notify(self, sample: Sample) -> None:
        """Wake the reader if there is something to give."""
        if self._is_due(sample):
            self.wake.set()

    def take(self) -> list[SampleDelta]:
        """What is due; wait on `wake` before asking again."""
        self.wake.clear()
        return [sample.take(self.rid) for sample in self.samples if self._is_due(sample)]

    def _is_due(self, sample: Sample) -> bool:
        if self.interval is None:
            return sample.finish is not None and not sample.taken
        return sample.is_due(self.interval)


def _joined(parts: list[TokenLogprobs]) -> TokenLogprobs | None:
    if len(parts) < 2:
        return parts[0] if parts else None

    def rows(name: str) -> np.ndarray | None:
        arrays = [array for part in parts if (array := getattr(part, name)) is not None]
        return np.concatenate(arrays) if arrays else None

    return TokenLogprobs(
        token_ids=np.concatenate([part.token_ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        top_ids=rows("top_ids"),
        top_logprobs=rows("top_logprobs"),
        chosen_logprobs=rows("chosen_logprobs"),
    )

"""Answers to conversations: the pipeline shared by chat, responses, messages and Ollama."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from sylvan.api.client_fields import of_tools
from sylvan.api.openai.chat_logprobs import ChatLogprobs
from sylvan.protocol.messages import Finish, Usage
from sylvan.runtime.serving.conversation import Conversation, Prepared, prepare
from sylvan.runtime.serving.samples import Sample, collect, stream
from sylvan.runtime.serving.service import GenerationService
from sylvan.runtime.tokenizer.types import SampleDelta, error_of
from sylvan.text.output import (
    OutputReader,
    OutputRules,
    ParsedOutput,
    Piece,
    ReasoningDelta,
    read_whole,
)
from sylvan.text.output import TextDelta as Text
from sylvan.text.reasoning.tokens import ReasoningCounter
from sylvan.text.spans import TextSpan


class Update(msgspec.Struct, frozen=True):
    """New output of one sample, and its token counts.

    Attributes:
        index: Index of the sample.
        delta: The engine's delta.
        pieces: The new text, parsed.
        reasoning_tokens: Number of reasoning tokens so far.
        has_calls: Whether it has called a function.
        spans: Positions of the pieces in the output, if log probabilities are wanted.
    """

    index: int
    delta: SampleDelta
    pieces: list[Piece]
    reasoning_tokens: int = 0
    has_calls: bool = False
    spans: Sequence[TextSpan] = ()

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        return self.delta.usage

    @property
    def finish(self) -> Finish | None:
        """Finish reason; None before the last update."""
        return self.delta.finish


class FinishedAnswer(msgspec.Struct, frozen=True):
    """A finished sample."""

    sample: Sample
    answer: ParsedOutput
    reasoning_tokens: int

    @property
    def usage(self) -> Usage:
        """Token counts."""
        return self.sample.usage

    @property
    def finish(self) -> Finish:
        """Finish reason."""
        assert self.sample.finish is not None, "a collected sample is finished"
        return self.sample.finish


class AnswerRun:
    """Generates one answer to a conversation.

    Args:
        service: The generation service.
        conversation: The conversation.
        names: Maps the engine's field names to the client's; extended here.
        max_tokens: Limit for an answer without a limit of the client.
    """

    def __init__(
        self,
        service: GenerationService,
        conversation: Conversation,
        names: dict[str, str],
        max_tokens: int | None = None,
    ) -> None:
        self._service = service
        self._conversation = conversation
        self._names = names
        self._max_tokens = max_tokens
        self._prepared: Prepared | None = None

    async def prepared(self) -> Prepared:
        """Return the conversation as engine input.

        Raises:
            RequestError: It cannot be rendered, or its options cannot be enforced.
        """
        if self._prepared is None:
            asked, names = self._conversation, self._names
            found = await prepare(self._service, asked)
            names.update(of_tools(asked.tool_use, asked.sampling, found.input.sampling, names))
            self._prepared = self._limited(found)
        return self._prepared

    async def whole(self) -> list[FinishedAnswer]:
        """Return all finished samples.

        Raises:
            RequestError: The request cannot be served.
            CapacityError: The request cannot be served now.
        """
        prepared = await self.prepared()
        [samples] = await collect(self._service, [prepared.input])
        finished_samples: list[FinishedAnswer] = []
        for sample in samples:
            answer = read_whole(prepared.rules, sample.text)
            ids, thinking = sample.token_ids, answer.reasoning
            tokens = count_reasoning(self._service, prepared.rules, ids, thinking)
            finished_samples.append(FinishedAnswer(sample, answer, tokens))
        return finished_samples

    async def updates(self) -> AsyncGenerator[Update, None]:
        """Yield updates of all samples, interleaved. Closing it aborts the request."""
        prepared = await self.prepared()
        n = prepared.input.sampling.n
        readers = [_SampleReader(self._service, prepared, i) for i in range(n)]
        async with aclosing(stream(self._service, [prepared.input])) as deltas:
            async for _, delta in deltas:
                if (error := error_of(delta.finish)) is not None:
                    raise error
                yield readers[delta.index].read(delta)

    def log(self, prepared: Prepared, *, every: bool = False) -> ChatLogprobs:
        """Make the log probability recorder of a sample; see `ChatLogprobs` for `every`."""
        skip = prepared.input.sampling.skip_special_tokens
        return ChatLogprobs(self._service.manager.tokenizer, skip_special_tokens=skip, every=every)

    async def text_logprobs(self, finished: FinishedAnswer) -> list[dict[str, Any]]:
        """Return log probabilities of a finished text's tokens, without its reasoning."""
        sample = finished.sample
        spans = [span for span in finished.answer.spans if not span.thinking]
        log = self.log(await self.prepared())
        return log.reply(sample.token_ids, sample.logprobs, sample.text, spans)["content"]

    def _limited(self, prepared: Prepared) -> Prepared:
        if self._max_tokens is None or prepared.input.sampling.max_new_tokens is not None:
            return prepared
        facts = self._service.manager.facts
        room = facts.max_request_tokens - len(prepared.prompt.input_ids)
        limit = min(self._max_tokens, room) if room > 0 else None
        sampling = msgspec.structs.replace(prepared.input.sampling, max_new_tokens=limit)
        return prepared.with_sampling(sampling)


class TextLog:
    """Log probabilities of a streamed text, without its reasoning."""

    def __init__(self, log: ChatLogprobs) -> None:
        self._log = log

    def add(self, update: Update) -> list[dict[str, Any]]:
        """Return those of an update."""
        delta = update.delta
        spans = [span for span in update.spans if not span.thinking]
        parts = [] if delta.logprobs is None else [delta.logprobs]
        return self._log.reply(delta.token_ids, parts, delta.text, spans)["content"]


class _SampleReader:
    """Parses the output of one sample."""

    def __init__(self, service: GenerationService, prepared: Prepared, index: int) -> None:
        self._service, self._rules, self._index = service, prepared.rules, index
        self._logs = prepared.input.logprobs is not None
        self._plain = prepared.rules.plain and not self._logs
        self._reader = OutputReader(prepared.rules)
        inside = prepared.rules.starts_in_reasoning
        self._counter = ReasoningCounter(service.parsers.marks, inside=inside)
        self._ids: list[int] = []
        self._thinking, self._thought = "", 0
        self._counted = prepared.rules.reasoning is None

    def read(self, delta: SampleDelta) -> Update:
        """Parse a delta."""
        if self._plain:
            return Update(self._index, delta, [Text(delta.text)] if delta.text else [])
        reader = self._reader
        pieces = reader.feed(delta.text)
        if delta.finish is not None:
            pieces += reader.finish()
        if not self._counted:
            self._count(delta, pieces)
        spans = reader.spans() if self._logs else ()
        return Update(self._index, delta, pieces, self._thought, reader.has_calls, spans)

    def _count(self, delta: SampleDelta, pieces: Sequence[Piece]) -> None:
        """Count reasoning tokens while they arrive, and again at the end."""
        self._ids.extend(delta.token_ids)
        self._counter.add(delta.token_ids)
        thoughts = [piece.text for piece in pieces if isinstance(piece, ReasoningDelta)]
        self._thinking += "".join(thoughts)
        self._counted = delta.finish is not None or len(thoughts) < len(pieces)
        if self._counted:
            thinking = self._thinking
            self._thought = count_reasoning(self._service, self._rules, self._ids, thinking)
        elif self._thinking:
            self._thought = self._counter.count


def count_reasoning(
    service: GenerationService, rules: OutputRules, ids: Sequence[int], reasoning: str
) -> int:
    """Count tokens up to the marker that ends thinking, inclusive; all if there is none.

    If that marker was merged with its neighbours, the reasoning is tokenised again.
    """
    family, tokenizer = rules.reasoning, service.manager.tokenizer
    if family is None or not reasoning:
        return 0
    ends = service.parsers.think_ends
    for at in range(len(ids)):
        for end in ends[: len(family.ends)]:
            if ids[at] == end[0] and tuple(ids[at : at + len(end)]) == end:
                return at + len(end)
    text = tokenizer.decode(list(ids), skip_special_tokens=False)
    if not any(mark in text for mark in (*family.ends, *family.interrupts)):
        return len(ids)
    tokens = tokenizer.encode(reasoning, add_special_tokens=False)
    return min(len(tokens), len(ids))

"""One answer to one conversation, for the APIs that know no `n`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec

from sylvan.api.openai.chat_logprobs import ChatLogprobs
from sylvan.protocol.messages import Finish, Usage
from sylvan.runtime.server.conversation import Conversation, Prepared, prepare
from sylvan.runtime.server.endpoint import Call
from sylvan.runtime.server.fields import of_tools
from sylvan.runtime.server.samples import collect, stream
from sylvan.runtime.server.thinking import count_reasoning
from sylvan.runtime.tokenizer.types import error_of
from sylvan.text.output import Answer, OutputReader, Piece, ReasoningDelta, read_whole


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished answer."""

    answer: Answer
    finish: Finish
    usage: Usage
    reasoning_tokens: int
    logprobs: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Of the tokens of the text, if asked for."""


@dataclass(frozen=True, slots=True)
class Step:
    """What is new of an answer, and its counts so far."""

    pieces: list[Piece]
    usage: Usage
    finish: Finish | None
    logprobs: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


class Turn:
    """Runs a conversation once.

    Attributes:
        reasoning_tokens: Tokens of thinking; valid after the last step.
    """

    def __init__(
        self, call: Call[Any], conversation: Conversation, max_tokens: int | None = None
    ) -> None:
        """`max_tokens` shortens an answer for which the client set no limit."""
        self._call = call
        self._conversation = conversation
        self._max_tokens = max_tokens
        self.reasoning_tokens = 0

    async def whole(self) -> Outcome:
        """The answer, when it is finished.

        Raises:
            RequestError: It cannot be served.
            CapacityError: Not now.
        """
        context = self._call.context
        prepared = await self._prepare()
        [[sample]] = await collect(context, [prepared.input])
        answer = read_whole(prepared.rules, sample.text)
        assert sample.finish is not None, "a collected sample is finished"
        tokens = count_reasoning(context, prepared.rules, sample.token_ids, answer.reasoning)
        spans = [span for span in answer.spans if not span.thinking]
        entries = self._log(prepared).reply(sample.token_ids, sample.logprobs, sample.text, spans)
        return Outcome(answer, sample.finish, sample.usage, tokens, entries["content"])

    async def steps(self) -> AsyncGenerator[Step, None]:
        """The answer as it comes; the last step has the finish. Closing it ends the request."""
        context = self._call.context
        prepared = await self._prepare()
        reader, log = OutputReader(prepared.rules), self._log(prepared)
        ids: list[int] = []
        thinking = ""
        async with aclosing(stream(context, [prepared.input])) as deltas:
            async for _, delta in deltas:
                if (error := error_of(delta.finish)) is not None:
                    raise error
                pieces = reader.feed(delta.text)
                if delta.finish is not None:
                    pieces += reader.finish()
                if prepared.rules.reasoning is not None:
                    ids.extend(delta.token_ids)
                    thinking += "".join(p.text for p in pieces if isinstance(p, ReasoningDelta))
                if delta.finish is not None:
                    self.reasoning_tokens = count_reasoning(context, prepared.rules, ids, thinking)
                spans = [span for span in reader.spans() if not span.thinking]
                parts = [] if delta.logprobs is None else [delta.logprobs]
                entries = log.reply(delta.token_ids, parts, delta.text, spans)["content"]
                yield Step(pieces, delta.usage, delta.finish, entries)

    def _log(self, prepared: Prepared) -> ChatLogprobs:
        skip = prepared.input.sampling.skip_special_tokens
        tokenizer = self._call.context.engine.tokenizer
        return ChatLogprobs(tokenizer, skip_special_tokens=skip, every=False)

    async def _prepare(self) -> Prepared:
        prepared = await prepare(self._call.context, self._conversation)
        asked, names = self._conversation, self._call.names
        names.update(of_tools(asked.tool_use, asked.sampling, prepared.input.sampling, names))
        if self._max_tokens is None or prepared.input.sampling.max_new_tokens is not None:
            return prepared
        facts = self._call.context.engine.facts
        room = facts.max_request_tokens - len(prepared.prompt.input_ids)
        limit = min(self._max_tokens, room) if room > 0 else None
        sampling = msgspec.structs.replace(prepared.input.sampling, max_new_tokens=limit)
        return prepared.with_sampling(sampling)

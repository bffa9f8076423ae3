"""Native generate calls: from the body of `/generate` to the objects that it answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sylvan.api.native import GenerateBody, Limits, Prompt, read_prompts, session_of
from sylvan.api.native_reply import ReplyOptions, ReplyState, timing_keys
from sylvan.protocol.errors import RequestError
from sylvan.runtime.tokenizer.manager import TokenizerManager
from sylvan.runtime.tokenizer.types import GenerateInput, SampleDelta, error_of
from sylvan.text.reasoning.tokens import ReasoningCounter, ReasoningMarks
from sylvan.utils.clock import Clock, monotonic

Reply = dict[str, Any]

LIMITS = Limits(max_samples=65536, max_top_logprobs=1024)
_UNREAD_DELTAS = 64  # of one prompt of a batch; beyond, its deltas are merged


@dataclass(frozen=True, slots=True)
class Style:
    """How answers look.

    Attributes:
        defaults: Sampling parameters that a body leaves out.
        cumulative: Streams hold all text so far.
        marks: Where thinking begins and ends; None: it is not counted.
    """

    defaults: Mapping[str, Any]
    cumulative: bool = True
    marks: ReasoningMarks | None = None


class NativeCall:
    """One prompt, or a batch of prompts, under way.

    Args:
        manager: Where the prompts go.
        body: Checked already for its types.
        style: How answers look.

    Raises:
        RequestError: the body does not make sense; names the field.
    """

    def __init__(
        self, manager: TokenizerManager, body: GenerateBody, style: Style, clock: Clock = monotonic
    ) -> None:
        self._manager, self._body, self._style, self._clock = manager, body, style, clock
        if session_of(body) is not None:
            message = "session_params: sessions are kept by the HTTP server only."
            raise RequestError(message, param="session_params")
        self._prompts, self._is_batch = read_prompts(body, style.defaults, LIMITS)
        _check_thinking(body, self._prompts)
        self._n = self._prompts[0].sampling.n
        self._began_s = clock()

    async def whole(self) -> Reply | list[Reply]:
        """The finished answer, or a list of them: all samples of the first prompt, then the next.

        Raises:
            RequestError: one of the prompts cannot be served; the others are aborted.
            CapacityError: likewise, for now.
        """
        tasks = [asyncio.create_task(self._collect(prompt)) for prompt in self._prompts]
        try:
            samples = [reply for replies in await asyncio.gather(*tasks) for reply in replies]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return samples if self._is_batch or self._n > 1 else samples[0]

    async def stream(self) -> AsyncGenerator[Reply, None]:
        """Answers as they grow; those of several samples carry an `index`.

        Raises:
            RequestError: see `whole`.
            CapacityError: see `whole`.
        """
        many = self._is_batch or self._n > 1
        if len(self._prompts) == 1:
            async with aclosing(self._replies(self._prompts[0], 0 if many else None)) as replies:
                async for reply in replies:
                    yield reply
            return
        queue: asyncio.Queue[Reply | BaseException | None] = asyncio.Queue(_UNREAD_DELTAS)
        tasks = [
            asyncio.create_task(self._feed(queue, prompt, i * self._n))
            for i, prompt in enumerate(self._prompts)
        ]
        try:
            left = len(tasks)
            while left:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _feed(
        self, queue: asyncio.Queue[Reply | BaseException | None], prompt: Prompt, first: int
    ) -> None:
        try:
            async with aclosing(self._replies(prompt, first)) as replies:
                async for reply in replies:
                    await queue.put(reply)
            await queue.put(None)
        except Exception as error:  # handed to whoever reads the queue
            await queue.put(error)

    async def _collect(self, prompt: Prompt) -> Sequence[Reply]:
        last: dict[int, Reply] = {}
        async with aclosing(self._replies(prompt, 0)) as replies:
            async for reply in replies:
                last[reply.pop("index")] = reply
        return [last[index] for index in sorted(last)]

    async def _replies(self, prompt: Prompt, first: int | None) -> AsyncGenerator[Reply, None]:
        """Answers of the samples of a prompt; they are numbered from `first` on."""
        stream = bool(self._body.stream)
        states = [
            ReplyState(
                self._options(prompt, None if first is None else first + i),
                self._style.cumulative or not stream,
            )
            for i in range(self._n)
        ]
        counters = [self._counter(prompt) for _ in states]
        deltas = self._manager.generate(self._input(prompt, stream))
        async with aclosing(deltas):
            async for delta in deltas:
                if (error := error_of(delta.finish)) is not None:
                    raise error
                state, counter = states[delta.index], counters[delta.index]
                counter.add(delta.token_ids)
                state.reasoning_tokens = counter.count
                state.add(delta.text, delta.token_ids, delta.logprobs, delta.prompt_logprobs)
                state.weight_versions = delta.weight_versions
                yield self._reply(state, delta)

    def _reply(self, state: ReplyState, delta: SampleDelta) -> Reply:
        timing: dict[str, float] = {}
        if delta.finish is not None:
            elapsed_s = self._clock() - self._began_s
            tokens = delta.usage.completion_tokens
            timing = timing_keys(delta.timing, elapsed_s, _wall_clock(), tokens)
        reply = state.reply(delta.rid, delta.usage, delta.finish, timing)
        if state.cumulative:  # the next one grows the same lists
            reply["output_ids"] = list(reply["output_ids"])
            meta = reply["meta_info"].items()
            reply["meta_info"] = {k: list(v) if isinstance(v, list) else v for k, v in meta}
        return reply

    def _input(self, prompt: Prompt, stream: bool) -> GenerateInput:
        return GenerateInput(
            text=prompt.text,
            input_ids=prompt.input_ids,
            sampling=prompt.sampling,
            rid=prompt.rid,
            stream=stream,
            logprobs=prompt.logprobs,
            lora=prompt.lora,
            cache_salt=prompt.cache_salt,
            priority=self._body.priority or 0,
            deadline_s=self._body.timeout,
            ttft_ms=self._body.ttft_ms,
            tpot_ms=self._body.tpot_ms,
            media=prompt.media,
        )

    def _counter(self, prompt: Prompt) -> ReasoningCounter:
        marks, tokenizer = self._style.marks, self._manager.tokenizer
        inside = bool(self._body.require_reasoning)
        if marks is not None and not inside:
            inside = marks.is_open(prompt.text, prompt.input_ids or (), tokenizer)
        return ReasoningCounter(marks, inside=inside)

    def _options(self, prompt: Prompt, index: int | None) -> ReplyOptions:
        logprobs = prompt.logprobs
        with_text = bool(self._body.return_text_in_logprobs) and logprobs is not None
        return ReplyOptions(
            logprobs=logprobs is not None,
            top=logprobs is not None and logprobs.top > 0,
            wanted_ids=logprobs.token_ids if logprobs is not None else (),
            text_of=self._manager.tokenizer.token_text if with_text else None,
            prompt_ids=prompt.input_ids if self._body.return_prompt_token_ids else None,
            index=index,
            weight_version=self._manager.router.weight_version,
        )


def _wall_clock() -> float:
    """Seconds since 1970, for the time stamps that clients read."""
    return datetime.now(tz=UTC).timestamp()


def _check_thinking(body: GenerateBody, prompts: Sequence[Prompt]) -> None:
    """Refuse what needs the markers of a reasoning parser, which is the HTTP server's."""
    constrained = any(prompt.sampling.grammar is not None for prompt in prompts)
    for field, matters in (
        ("max_thinking_tokens", body.max_thinking_tokens is not None),
        ("require_reasoning", bool(body.require_reasoning) and constrained),
    ):
        if matters:
            message = f"{field}: thinking is followed by the HTTP server only."
            raise RequestError(message, param=field)

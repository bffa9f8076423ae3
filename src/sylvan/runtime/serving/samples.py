"""Collects samples from the engine: whole ones, or several prompts as one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from sylvan.protocol.errors import SylvanError
from sylvan.protocol.messages import Finish, Timing, TokenLogprobs, Usage
from sylvan.runtime.serving.service import GenerationService
from sylvan.runtime.tokenizer.checks import check_bytes
from sylvan.runtime.tokenizer.types import GenerateInput, SampleDelta, error_of

PROMPTS_PER_TURN = 16


@dataclass(slots=True)
class Sample:
    """The accumulated output of one sample."""

    rid: str = ""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: TokenLogprobs | None = None
    usage: Usage = field(default_factory=Usage)
    finish: Finish | None = None
    timing: Timing | None = None
    weight_versions: tuple[str, ...] = ()

    def add(self, delta: SampleDelta) -> None:
        """Append a delta."""
        self.rid = delta.rid
        self.text += delta.text
        self.token_ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            self.logprobs.append(delta.logprobs)
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs
        self.usage = delta.usage
        self.finish = delta.finish or self.finish
        self.timing = delta.timing or self.timing
        self.weight_versions = delta.weight_versions

    def last_delta(self, index: int) -> SampleDelta:
        """Make a delta that only carries the finish."""
        return SampleDelta(
            rid=self.rid,
            index=index,
            usage=self.usage,
            finish=self.finish,
            timing=self.timing,
            weight_versions=self.weight_versions,
        )


async def collect(
    service: GenerationService, inputs: Sequence[GenerateInput]
) -> list[list[Sample]]:
    """Return the finished samples of every prompt.

    Raises:
        RequestError: A prompt cannot be served; the others are aborted.
        CapacityError: A prompt cannot be served now; the others are aborted.
    """
    inputs = service.placed(inputs)
    if len(inputs) == 1:
        return [await _collect_one(service, 0, inputs[0])]
    _check_together(service, inputs)
    tasks: list[asyncio.Task[list[Sample]]] = []
    try:
        for i, inp in enumerate(inputs):
            tasks.append(asyncio.create_task(_collect_one(service, i, inp)))
            await _yield_to_others(i)
        return await asyncio.gather(*tasks)
    finally:
        await _end(tasks)


def _check_together(service: GenerationService, inputs: Sequence[GenerateInput]) -> None:
    limit = service.manager.limits.max_parameter_bytes
    check_bytes([inp.sampling for inp in inputs], limit)


async def _collect_one(service: GenerationService, prompt: int, inp: GenerateInput) -> list[Sample]:
    samples = [Sample() for _ in range(inp.sampling.n)]
    async with aclosing(service.manager.generate(inp)) as deltas:
        async for delta in deltas:
            service.journal.count(prompt, delta)
            samples[delta.index].add(delta)
            if (error := error_of(delta.finish)) is not None:
                raise error
    return samples


async def stream(
    service: GenerationService, inputs: Sequence[GenerateInput]
) -> AsyncGenerator[tuple[int, SampleDelta], None]:
    """Yield deltas of all prompts as they arrive, each with its prompt index.

    Closing it aborts what has not finished.

    Raises:
        RequestError: A prompt cannot be served; the others are aborted.
        CapacityError: A prompt cannot be served now; the others are aborted.
    """
    if len(inputs) > 1:
        _check_together(service, inputs)
    journal = service.journal
    inputs = service.placed(inputs)
    sources = [service.manager.generate(inp) for inp in inputs]
    try:
        if journal.resumes:
            for source in sources:
                await anext(source)
        for prompt, delta in journal.past(inputs):
            journal.note(prompt, delta)
            yield prompt, delta
        if len(sources) == 1:
            async for delta in sources[0]:
                journal.note(0, delta)
                yield 0, delta
            return
        async for prompt, delta in _merged(sources):
            journal.note(prompt, delta)
            yield prompt, delta
    finally:
        for source in sources:
            await source.aclose()


Source = AsyncGenerator[SampleDelta, None]
_Item = tuple[int, SampleDelta] | SylvanError | None


async def _merged(sources: Sequence[Source]) -> AsyncGenerator[tuple[int, SampleDelta], None]:
    queue: asyncio.Queue[_Item] = asyncio.Queue(2 * len(sources))
    running = len(sources)
    tasks: list[asyncio.Task[None]] = []
    try:
        for i, source in enumerate(sources):
            tasks.append(asyncio.create_task(_feed(i, source, queue)))
            await _yield_to_others(i)
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, SylvanError):
                raise item
            else:
                yield item
        await asyncio.gather(*tasks)
    finally:
        await _end(tasks)


async def _feed(index: int, source: Source, queue: asyncio.Queue[_Item]) -> None:
    try:
        async for delta in source:
            await queue.put((index, delta))
    except SylvanError as error:
        await queue.put(error)
    finally:
        await queue.put(None)


async def _yield_to_others(i: int) -> None:
    """Yield to other calls between prompts: a call may have thousands of them."""
    if i % PROMPTS_PER_TURN == PROMPTS_PER_TURN - 1:
        await asyncio.sleep(0)


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

"""Concurrent streams of a running model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing

from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.engine.runtime import Runtime
from sylvan.runtime.tokenizer.types import GenerateInput

DEADLINE_S = 60


class Streams:
    """Streams that are read concurrently."""

    def __init__(self, runtime: Runtime, count: int, tokens: int, name: str = "r") -> None:
        self.ids: list[list[int]] = [[] for _ in range(count)]
        self.finishes: list[str] = [""] * count
        self._tokens, self._name = tokens, name
        self.tasks = [asyncio.create_task(self._read(runtime, i)) for i in range(count)]

    async def _read(self, runtime: Runtime, index: int) -> None:
        sampling = SamplingParams(max_new_tokens=self._tokens, ignore_eos=True, sampling_seed=index)
        rid = f"{self._name}{index}"
        inp = GenerateInput(text=f"stream {index}", sampling=sampling, rid=rid)
        async with aclosing(runtime.manager.generate(inp)) as deltas:
            async for delta in deltas:
                self.ids[index] += delta.token_ids
                if delta.finish is not None:
                    self.finishes[index] = delta.finish.type

    async def under_way(self) -> None:
        """Wait until each has begun."""
        await until(lambda: all(self.ids))

    async def ended(self) -> list[list[int]]:
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*self.tasks)
        return self.ids


async def until(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not reached():
            await asyncio.sleep(0.01)

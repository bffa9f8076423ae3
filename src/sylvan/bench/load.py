"""Runs a workload against a target: when conversations start, and how many run concurrently."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

from sylvan.bench.outcome import RequestRecord
from sylvan.bench.target import BenchTarget
from sylvan.bench.workload import BenchConversation, BenchTurn
from sylvan.config.bench import LoadConfig, TargetConfig

Progress = Callable[[int, int], None]
"""Called with the number of finished requests, and of all."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One run.

    Attributes:
        outcomes: Outcome of each sent request.
        duration_s: From the first request to the end of the last.
        max_concurrent: Largest number of concurrent requests.
    """

    outcomes: Sequence[RequestRecord]
    duration_s: float
    max_concurrent: int


class BenchRun:
    """One run of a workload.

    Args:
        target: The target.
        load: When requests are sent.
        seed: Seed of the gaps between requests, and of the choice of adapters.
        adapters: Adapters that requests name.
    """

    def __init__(
        self,
        target: BenchTarget,
        load: LoadConfig,
        *,
        seed: int = 0,
        adapters: TargetConfig | None = None,
    ) -> None:
        self._target = target
        self._adapters = adapters or TargetConfig()
        self._config = load
        self._rng = random.Random(seed)
        self._sent = 0
        self._running = 0
        self._most = 0

    async def warm_up(self, conversation: BenchConversation) -> Sequence[RequestRecord]:
        """Send the first turn `load.warmup` times, sequentially, for at most 32 tokens each."""
        turn = conversation.turns[0]
        short = replace(turn, output_tokens=min(turn.output_tokens, 32))
        return [await self._ask(short, []) for _ in range(self._config.warmup)]

    async def run(self, work: Sequence[BenchConversation], progress: Progress) -> Measured:
        """Send the whole workload and wait for the answers, for at most `load.max_seconds`."""
        total = sum(len(conversation.turns) for conversation in work)
        ended = 0
        outcomes: list[RequestRecord] = []
        limit = self._config.concurrency
        slots = asyncio.Semaphore(limit) if limit else nullcontext()
        began_s = self._target.clock()

        async def converse(conversation: BenchConversation, due_s: float) -> None:
            nonlocal ended
            history: list[tuple[str, str]] = []
            for number, turn in enumerate(conversation.turns):
                async with slots:
                    sent_s = self._target.clock() - began_s
                    outcome = RequestRecord(turn.prompt_tokens, error="cut off by load.max_seconds")
                    outcomes.append(outcome)
                    place = len(outcomes) - 1
                    outcome = outcomes[place] = await self._ask(turn, history)
                outcome.turn, outcome.sent_s = number, sent_s
                outcome.due_s = due_s if number == 0 else sent_s
                ended += 1
                progress(ended, total)
                if outcome.error:
                    break
                history.append((turn.text, outcome.text))

        try:
            async with asyncio.timeout(self._config.max_seconds), asyncio.TaskGroup() as tasks:
                async for conversation, due_s in self._arrivals(work, began_s):
                    tasks.create_task(converse(conversation, due_s))
        except TimeoutError:
            pass
        return Measured(outcomes, self._target.clock() - began_s, self._most)

    async def _arrivals(
        self, work: Sequence[BenchConversation], began_s: float
    ) -> AsyncGenerator[tuple[BenchConversation, float]]:
        """Yield each conversation when it is due, with that time."""
        config, due_s = self._config, 0.0
        for number, conversation in enumerate(work):
            if config.timestamps:
                due_s = (conversation.at_s or 0.0) * config.slowdown
            elif config.rate is not None and number:
                shape = config.burstiness
                due_s += self._rng.gammavariate(shape, 1 / (config.rate * shape))
            wait_s = began_s + due_s - self._target.clock()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            yield conversation, due_s

    async def _ask(self, turn: BenchTurn, history: Sequence[tuple[str, str]]) -> RequestRecord:
        adapter = self._adapter()
        self._sent += 1
        self._running += 1
        self._most = max(self._most, self._running)
        try:
            return await self._target.ask(turn, history, adapter)
        finally:
            self._running -= 1

    def _adapter(self) -> str | None:
        names = self._adapters.adapters
        if not names:
            return None
        match self._adapters.adapter_choice:
            case "distinct":
                return names[self._sent % len(names)]
            case "uniform":
                return self._rng.choice(names)
            case "zipf":
                exponent = self._adapters.adapter_zipf
                weights = [(place + 1) ** -exponent for place in range(len(names))]
                return self._rng.choices(names, weights)[0]

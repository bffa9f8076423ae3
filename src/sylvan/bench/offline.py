"""An in-process engine as the target of a load test, without HTTP."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, cast

from sylvan.bench.apis import GenerateApi
from sylvan.bench.client import TargetError, extra_fields
from sylvan.bench.outcome import RequestRecord, TokenTimer
from sylvan.bench.workload import BenchTurn
from sylvan.config.bench import AnswerConfig
from sylvan.protocol.errors import SylvanError
from sylvan.runtime.engine.engine import Engine


class InProcess:
    """Sends requests to an engine.

    Args:
        engine: The engine; not closed here.
        answer: Options of answers.
    """

    def __init__(self, engine: Engine, answer: AnswerConfig) -> None:
        self._engine = engine
        self._api = GenerateApi(answer)
        self._extra = extra_fields(answer.extra_body)

    def clock(self) -> float:
        return time.perf_counter()

    async def ask(
        self, turn: BenchTurn, history: Sequence[tuple[str, str]], adapter: str | None
    ) -> RequestRecord:
        body = self._api.body(turn, history, "", adapter)
        body |= {**self._extra, **(turn.extra or {})}
        outcome = RequestRecord(turn.prompt_tokens)
        reception = TokenTimer(outcome, self.clock())
        try:
            await self._read(body, reception)
        except SylvanError as error:
            outcome.error = f"{type(error).__name__}: {error}"
        reception.end(self.clock())
        return outcome

    async def flush_cache(self) -> None:
        if not self._engine.flush_cache():
            raise TargetError("the cache cannot be emptied while requests are served")

    async def _read(self, body: dict[str, Any], reception: TokenTimer) -> None:
        answer = await self._engine.async_generate(body.pop("text", None), **body)
        if body["stream"]:
            async for reply in cast("AsyncIterator[Mapping[str, Any]]", answer):
                self._api.read(reply, reception, self.clock())
        else:
            self._api.read(cast("Mapping[str, Any]", answer), reception, self.clock())

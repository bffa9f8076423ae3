"""Liveness: each route has one exact meaning.

`/live`: the event loop answers and the children run or are being restarted. `/ready`: requests are
admitted, and the scheduler is not paused. `/health`: as `/ready`, and the scheduler has shown life
in the last two seconds; nothing is generated. `/health_generate`: one token, or one vector, comes
back.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from starlette.responses import Response

from sylvan.protocol.errors import SylvanError
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.server.context import Context
from sylvan.runtime.server.endpoint import Call
from sylvan.runtime.server.metrics import PROBE_PREFIX
from sylvan.runtime.tokenizer.types import EmbedInput, GenerateInput, error_of

HEARTBEAT_LIMIT_S = 2.0
PROBE_TIMEOUT_S = 20.0
PROBE_PRIORITY = 2**31 - 1


async def live(call: Call[None]) -> Response:
    """200 while the processes run or are being restarted."""
    return _answer(call.context.engine.alive())


async def ready(call: Call[None]) -> Response:
    """200 while requests are admitted."""
    return _answer(call.context.engine.ready())


async def health(call: Call[None]) -> Response:
    """200 while requests are admitted and the scheduler shows life."""
    engine = call.context.engine
    return _answer(engine.ready() and engine.heartbeat_age_s() < HEARTBEAT_LIMIT_S)


async def health_generate(call: Call[None]) -> Response:
    """200 once one token has been generated, or one vector made."""
    if not call.context.engine.ready():
        return _answer(False)
    try:
        return _answer(await asyncio.wait_for(_probe(call.context), PROBE_TIMEOUT_S))
    except TimeoutError:
        return _answer(False)


async def _probe(context: Context) -> bool:
    if not context.engine.facts.is_generation:
        return await _embed(context)
    inp = GenerateInput(
        input_ids=[context.engine.tokenizer.bos_id or 0],
        sampling=SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True),
        rid=f"{PROBE_PREFIX}_{context.clock():.9f}",
        priority=PROBE_PRIORITY,
        stream=False,
    )
    try:
        async with aclosing(context.engine.generate(inp)) as deltas:
            async for delta in deltas:
                return error_of(delta.finish) is None
    except SylvanError:
        return False
    return False


async def _embed(context: Context) -> bool:
    inp = EmbedInput(
        input_ids=[context.engine.tokenizer.bos_id or 0],
        rid=f"{PROBE_PREFIX}_{context.clock():.9f}",
        priority=PROBE_PRIORITY,
    )
    try:
        await context.engine.embed(inp)
    except SylvanError:
        return False
    return True


def _answer(good: bool) -> Response:
    return Response(status_code=200 if good else 503)

"""Health checks, each with an exact meaning.

`/live`: the event loop runs, and the processes run or are restarting. `/ready` and `/health`:
requests are admitted and not paused, and a scheduler sent a heartbeat in the last two seconds;
nothing is generated. `/health_generate`: one token, or one embedding, was computed.
"""

from __future__ import annotations

import asyncio
import secrets
from contextlib import aclosing

from starlette.responses import Response

from sylvan.protocol.errors import SylvanError
from sylvan.protocol.requests import RequestOptions
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.server.context import Context
from sylvan.runtime.server.endpoint import Call
from sylvan.runtime.tokenizer.types import EmbedInput, GenerateInput, error_of

PROBE_PREFIX = "HEALTH_CHECK"
PROBE_TIMEOUT_S = 20.0
PROBE_PRIORITY = 2**31 - 1


async def live(call: Call[None]) -> Response:
    """Answer 200 while the processes run or are restarting."""
    return _answer(call.context.engine.alive())


async def ready(call: Call[None]) -> Response:
    """Answer 200 while requests are admitted and a scheduler sends heartbeats."""
    return _answer(call.context.engine.ready())


async def health(call: Call[None]) -> Response:
    """Answer 200 while requests are admitted and a scheduler sends heartbeats; same as `/ready`."""
    return _answer(call.context.engine.ready())


async def health_generate(call: Call[None]) -> Response:
    """Answer 200 once one token was generated, or one embedding computed."""
    context = call.context
    if not context.engine.ready():
        return _answer(False)
    # concurrent callers share one probe, because calling it requires no key
    return _answer(await context.probe.run(lambda: _timely_probe(context)))


async def _timely_probe(context: Context) -> bool:
    try:
        return await asyncio.wait_for(_probe(context), PROBE_TIMEOUT_S)
    except TimeoutError:
        return False


async def _probe(context: Context) -> bool:
    if not context.engine.facts.is_generation:
        return await _embed(context)
    inp = GenerateInput(
        input_ids=[context.engine.tokenizer.bos_id or 0],
        sampling=SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True),
        rid=_probe_rid(),
        options=RequestOptions(priority=PROBE_PRIORITY),
        stream=False,
        internal=True,
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
        rid=_probe_rid(),
        priority=PROBE_PRIORITY,
        internal=True,
    )
    try:
        await context.engine.embed(inp)
    except SylvanError:
        return False
    return True


def _probe_rid() -> str:
    """Return a request ID that no client can have chosen."""
    return f"{PROBE_PREFIX}_{secrets.token_hex(16)}"


def _answer(good: bool) -> Response:
    return Response(status_code=200 if good else 503)

"""Stage 7: decodes token IDs to text, and formats the text as the answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from sylvan.gateway.grpc.context import RequestContext, SampleText, garbage

_SSE = [("content-type", "text/event-stream; charset=utf-8"), ("cache-control", "no-cache")]


class ResponseProcessing:
    """Reads the replies, and writes the answer to the client."""

    name = "response_processing"

    async def run(self, context: RequestContext) -> None:
        prepared, given = context.prepared, context.input
        answer, streams = given.answer, given.parsed.stream
        async with aclosing(self._deltas(context)) as deltas:
            async for delta in deltas:
                chunk = prepared.format.events(delta)
                if streams and chunk:
                    if not answer.started:
                        await answer.head(200, _SSE)
                    given.meter.first_byte()
                    await answer.data(chunk)
        if not streams:
            given.meter.first_byte()
            await given.caller.reply_json(prepared.format.whole())
            return
        if not answer.started:
            await answer.head(200, _SSE)
        await answer.data(prepared.format.end())
        await answer.end()

    async def _deltas(self, context: RequestContext) -> AsyncGenerator[SampleText, None]:
        state, replies = context.state, context.state.replies
        assert replies is not None, "request execution comes first"
        async with aclosing(replies):
            async for reply in replies:
                kind = reply.WhichOneof("response")
                if kind is None:
                    raise garbage("an empty reply")
                part = reply.chunk if kind == "chunk" else reply.complete
                if part.index >= len(state.samples) or state.samples[part.index].finish_reason:
                    raise garbage(f"sample {part.index}")
                delta = state.samples[part.index].take(part)
                state.losses = 0
                yield delta
                if all(sample.finish_reason for sample in state.samples):
                    return
        raise garbage("the stream ended before its samples")

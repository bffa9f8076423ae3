"""Stage 7: token ids become text, text becomes the answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from sylvan.gateway.grpc.context import RequestContext, SampleDelta, garbage
from sylvan.protocol.messages import Finish, Usage
from sylvan.rpc import scheduler_pb2 as pb
from sylvan.text.detokenizer import IncrementalDetokenizer

PROMPT_TAIL = 8
"""Tokens of the prompt that decide whether an output continues a text."""
_SSE = [("content-type", "text/event-stream; charset=utf-8"), ("cache-control", "no-cache")]


class ResponseProcessing:
    """Reads the replies, and writes the answer to the client."""

    name = "response_processing"

    async def run(self, context: RequestContext) -> None:
        """See `Stage.run`."""
        prepared, given = context.prepared, context.input
        answer, streams = given.answer, given.asked.stream
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

    async def _deltas(self, context: RequestContext) -> AsyncGenerator[SampleDelta, None]:
        prepared, replies = context.prepared, context.state.replies
        assert replies is not None, "request execution comes first"
        tail = list(prepared.input_ids[-PROMPT_TAIL:])
        samples = [
            _Sample(
                IncrementalDetokenizer(
                    prepared.text.tokenizer, prepared.detokenizer, prompt_tail_ids=tail
                )
            )
            for _ in range(prepared.sampling.n)
        ]
        async with aclosing(replies):
            async for reply in replies:
                delta = _delta(samples, reply)
                context.state.totals[delta.index] = delta.usage
                yield delta
                if all(sample.ended for sample in samples):
                    return
        raise garbage("the stream ended before its samples")


class _Sample:
    """One sample so far."""

    def __init__(self, detokenizer: IncrementalDetokenizer) -> None:
        self.detokenizer = detokenizer
        self.num_ids = 0
        self.ended = False


def _delta(samples: list[_Sample], reply: pb.GenerateResponse) -> SampleDelta:
    """What a reply brings.

    Raises:
        UpstreamError: It cannot be of this request.
    """
    kind = reply.WhichOneof("response")
    if kind is None:
        raise garbage("an empty reply")
    part = reply.chunk if kind == "chunk" else reply.complete
    if part.index >= len(samples) or samples[part.index].ended:
        raise garbage(f"sample {part.index}")
    sample = samples[part.index]
    usage = Usage(
        prompt_tokens=part.prompt_tokens,
        completion_tokens=part.completion_tokens,
        cached_tokens=part.cached_tokens,
    )
    if isinstance(part, pb.GenerateStreamChunk):
        ids = list(part.token_ids)
        text = sample.detokenizer.push(ids).text
        sample.num_ids += len(ids)
        return SampleDelta(index=part.index, text=text, token_ids=ids, usage=usage)
    ids = list(part.output_ids)[sample.num_ids :]
    sample.ended = True
    last = sample.detokenizer.push(ids, final=True)
    return SampleDelta(
        index=part.index,
        text=last.text,
        token_ids=ids,
        usage=usage,
        finish=_finish(part, last.stop),
    )


def _finish(part: pb.GenerateComplete, stop: str | None) -> Finish:
    matched: int | str | None = stop
    which = part.WhichOneof("matched_stop")
    if matched is None and which is not None:
        matched = getattr(part, which)
    match part.finish_reason:
        case "stop":
            return Finish(type="stop", matched=matched)
        case "length":
            return Finish(type="length", length=part.completion_tokens)
        case "abort":
            return Finish(type="abort", message="aborted")
        case other:
            raise garbage(f"finish_reason {other[:40]!r}")

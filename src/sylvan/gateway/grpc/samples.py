"""The progress of a request's samples; it outlives the worker that started them."""

from __future__ import annotations

from collections.abc import Sequence

from sylvan.gateway.grpc.context import PreparedRequest, SampleText, garbage
from sylvan.gateway.grpc.logprobs import read_inputs, read_outputs
from sylvan.protocol.messages import Finish, Usage
from sylvan.rpc import scheduler_pb2 as pb
from sylvan.text.detokenizer import IncrementalDetokenizer

PROMPT_TAIL = 8
"""Prompt tokens that are checked to decide whether an output continues a text."""


class RelayedSample:
    """The progress of one sample.

    Attributes:
        token_ids: All tokens received.
        usage: Token counts so far.
        finish_reason: Finish reason as the worker sent it; "" while the sample runs.
    """

    def __init__(self, prepared: PreparedRequest) -> None:
        tail = list(prepared.input_ids[-PROMPT_TAIL:])
        self._detokenizer = IncrementalDetokenizer(
            prepared.text.tokenizer, prepared.detokenizer, prompt_tail_ids=tail
        )
        self.token_ids: list[int] = []
        self.usage = Usage()
        self.finish_reason = ""
        self._has_prompt = False

    def take(self, part: pb.GenerateStreamChunk | pb.GenerateComplete) -> SampleText:
        """Apply a reply of the worker.

        Raises:
            UpstreamError: The reply cannot belong to this sample.
        """
        self.usage = Usage(
            prompt_tokens=part.prompt_tokens,
            completion_tokens=part.completion_tokens,
            cached_tokens=part.cached_tokens,
        )
        if isinstance(part, pb.GenerateStreamChunk):
            return self._delta(part, list(part.token_ids))
        ids = list(part.output_ids)
        if ids[: len(self.token_ids)] != self.token_ids:
            raise garbage("a sample that ends otherwise than it began")
        return self._delta(part, ids[len(self.token_ids) :], part)

    def emitted(self, index: int) -> pb.EmittedSample:
        """Return the state that another worker needs to continue the sample."""
        return pb.EmittedSample(
            index=index,
            token_ids=self.token_ids,
            prompt_tokens=self.usage.prompt_tokens,
            completion_tokens=self.usage.completion_tokens,
            cached_tokens=self.usage.cached_tokens,
            finish_reason=self.finish_reason,
        )

    def _delta(
        self,
        part: pb.GenerateStreamChunk | pb.GenerateComplete,
        ids: Sequence[int],
        end: pb.GenerateComplete | None = None,
    ) -> SampleText:
        found = self._detokenizer.push(ids, final=end is not None)
        self.token_ids.extend(ids)
        finish = None
        if end is not None:
            finish = _finish(end, found.stop)
            self.finish_reason = end.finish_reason
        prompt = None
        if not self._has_prompt:
            prompt = read_inputs(part.input_logprobs)
            self._has_prompt = prompt is not None
        return SampleText(
            index=part.index,
            text=found.text,
            token_ids=ids,
            usage=self.usage,
            finish=finish,
            logprobs=read_outputs(part.output_logprobs, len(ids)),
            prompt_logprobs=prompt,
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

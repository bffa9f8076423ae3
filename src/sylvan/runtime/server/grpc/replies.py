"""Converts engine output to gRPC messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from sylvan.protocol.messages import TokenLogprobs
from sylvan.protocol.requests import LogprobOptions
from sylvan.rpc import scheduler_pb2 as pb
from sylvan.runtime.tokenizer.types import SampleDelta, Vector


@dataclass(slots=True)
class SampleReplies:
    """Builds the messages of one sample.

    Args:
        rid: Request ID.
        options: Requested log probabilities.
        stream: Whether to send chunks before the end.
    """

    rid: str
    options: LogprobOptions | None
    stream: bool
    _ids: list[int] = field(default_factory=list[int])
    _logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    _prompt_logprobs: TokenLogprobs | None = None

    def begin(self, token_ids: Sequence[int]) -> None:
        """Skip tokens that another server sent."""
        self._ids.extend(token_ids)

    def add(self, delta: SampleDelta) -> list[pb.GenerateResponse]:
        """Return the messages due after a delta."""
        self._ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            self._logprobs.append(delta.logprobs)
        self._prompt_logprobs = delta.prompt_logprobs or self._prompt_logprobs
        made: list[pb.GenerateResponse] = []
        if self.stream and delta.token_ids:
            made.append(pb.GenerateResponse(request_id=self.rid, chunk=self._chunk(delta)))
        if delta.finish is not None:
            made.append(pb.GenerateResponse(request_id=self.rid, complete=self._complete(delta)))
        return made

    def _chunk(self, delta: SampleDelta) -> pb.GenerateStreamChunk:
        usage = delta.usage
        return pb.GenerateStreamChunk(
            token_ids=delta.token_ids,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            output_logprobs=self._outputs([delta.logprobs] if delta.logprobs else []),
            input_logprobs=_inputs(delta.prompt_logprobs),
            index=delta.index,
        )

    def _complete(self, delta: SampleDelta) -> pb.GenerateComplete:
        usage, finish = delta.usage, delta.finish
        assert finish is not None, "called at the end"
        matched = finish.matched
        return pb.GenerateComplete(
            output_ids=self._ids,
            finish_reason=finish.type,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            output_logprobs=self._outputs(self._logprobs),
            input_logprobs=_inputs(self._prompt_logprobs),
            index=delta.index,
            matched_token_id=matched if isinstance(matched, int) else None,
            matched_stop_str=matched if isinstance(matched, str) else None,
        )

    def _outputs(self, parts: list[TokenLogprobs]) -> pb.OutputLogProbs | None:
        if self.options is None:
            return None
        wanted = self.options.token_ids
        return pb.OutputLogProbs(
            token_logprobs=[value for part in parts for value in part.logprobs.tolist()],
            token_ids=[value for part in parts for value in part.token_ids.tolist()],
            top_logprobs=[row for part in parts for row in _tops(part)],
            token_ids_logprobs=[
                pb.TopLogProbs(values=row, token_ids=wanted)
                for part in parts
                if part.chosen_logprobs is not None
                for row in part.chosen_logprobs.tolist()
            ],
        )


def vector_reply(vector: Vector) -> pb.EmbedResponse:
    """Build the answer to `Embed`."""
    return pb.EmbedResponse(
        embedding_dim=vector.values.shape[-1],
        embedding=vector.values.ravel().tolist(),
        prompt_tokens=vector.usage.prompt_tokens,
    )


def _inputs(part: TokenLogprobs | None) -> pb.InputLogProbs | None:
    if part is None:
        return None
    return pb.InputLogProbs(
        token_logprobs=[
            pb.InputTokenLogProb(value=None if np.isnan(value) else value)
            for value in part.logprobs.tolist()
        ],
        token_ids=part.token_ids.tolist(),
        top_logprobs=_tops(part),
    )


def _tops(part: TokenLogprobs) -> list[pb.TopLogProbs]:
    """Return the alternatives of each position, without the padding (-1)."""
    if part.top_ids is None or part.top_logprobs is None:
        return []
    rows: list[pb.TopLogProbs] = []
    for ids, values in zip(part.top_ids, part.top_logprobs, strict=True):
        there = ids >= 0
        rows.append(pb.TopLogProbs(values=values[there].tolist(), token_ids=ids[there].tolist()))
    return rows

"""What a request carries from stage to stage."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sylvan.gateway.errors import UpstreamError
from sylvan.gateway.grpc.prefill import Prefill
from sylvan.gateway.http.answer import Answer
from sylvan.gateway.http.asked import ParsedBody
from sylvan.gateway.http.caller import Caller
from sylvan.gateway.http.routes import Passed
from sylvan.gateway.observe.meter import RequestMeter
from sylvan.gateway.placing import PlacedRequest
from sylvan.gateway.text.model import ModelText
from sylvan.gateway.upstream.grpc import GrpcUpstream, Metadata
from sylvan.gateway.workers.worker import Dispatch
from sylvan.protocol.messages import Finish, TokenLogprobs, Usage
from sylvan.protocol.requests import LogprobOptions, ThinkingOptions
from sylvan.protocol.sampling import SamplingParams
from sylvan.rpc import scheduler_pb2 as pb
from sylvan.text.detokenizer import DetokenizerOptions
from sylvan.text.output import OutputRules

EMBEDDINGS = "/v1/embeddings"
"""The one route that asks for vectors."""


@dataclass(frozen=True, slots=True)
class RequestInput:
    """What came, and where the answer goes.

    Attributes:
        caller: Who asks.
        route: For what.
        asked: The body.
        answer: To the client.
        meter: Measures the request.
    """

    caller: Caller
    route: Passed
    asked: ParsedBody
    answer: Answer
    meter: RequestMeter


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleText:
    """What is new of one sample, as text.

    Attributes:
        index: Which of the samples.
        text: New text.
        token_ids: New ids.
        usage: Counts so far.
        finish: Why it ended, with the last delta.
        logprobs: Of the new ids, if they were asked for.
        prompt_logprobs: Of the prompt, once, likewise.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    usage: Usage
    finish: Finish | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None


class ReplyFormat(Protocol):
    """Makes the answer of one route."""

    def events(self, delta: SampleText) -> bytes:
        """What a stream sends for a delta; empty if nothing is due."""
        ...

    def end(self) -> bytes:
        """The end of a stream."""
        ...

    def whole(self) -> Any:
        """The answer without a stream, once every sample has ended; JSON."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedRequest:
    """A request as token ids.

    Attributes:
        model: Name by which workers are looked for.
        text: Of the model.
        input_ids: The prompt.
        sampling: How to continue it.
        detokenizer: How ids become text.
        rules: How text becomes an answer.
        format: Makes the answer.
        namespace: Prompts of different namespaces share nothing in a cache.
        logprobs: Log probabilities that were asked for.
        thinking: Where the answer thinks.
        adapter: Name of the adapter; None: the model itself.
    """

    model: str | None
    text: ModelText
    input_ids: Sequence[int]
    sampling: SamplingParams
    detokenizer: DetokenizerOptions
    rules: OutputRules
    format: ReplyFormat
    namespace: str = ""
    logprobs: LogprobOptions | None = None
    thinking: ThinkingOptions | None = None
    adapter: str | None = None


class SampleProgress(Protocol):
    """One sample as far as it has come; see `sylvan.gateway.grpc.samples`."""

    token_ids: list[int]
    usage: Usage
    finish_reason: str

    def take(self, part: pb.GenerateStreamChunk | pb.GenerateComplete) -> SampleText:
        """What a reply brings."""
        ...

    def emitted(self, index: int) -> pb.EmittedSample:
        """What another worker must know to go on with it."""
        ...


@dataclass(slots=True)
class RequestState:
    """What the stages have found so far; those of an attempt are replaced by the next one.

    Attributes:
        prepared: By preparation.
        placed: By worker selection.
        dispatch: Counts the request against its worker, until it is closed.
        prefill: Of a pair, who computes the prompt; `placed` is then who continues it.
        client: By client acquisition.
        message: By request building.
        metadata: By dispatch metadata.
        replies: By request execution; the first one has been read.
        samples: As far as they have come; kept from attempt to attempt.
        seed: Of samples, where neither the client nor the operator has one.
        losses: Workers lost in a row, without progress.
        avoid: Ids of workers that have failed.
    """

    prepared: PreparedRequest | None = None
    placed: PlacedRequest | None = None
    dispatch: Dispatch | None = None
    prefill: Prefill | None = None
    client: GrpcUpstream | None = None
    message: pb.GenerateRequest | None = None
    metadata: Metadata = ()
    replies: AsyncGenerator[pb.GenerateResponse, None] | None = None
    samples: Sequence[SampleProgress] = ()
    seed: int = field(default_factory=lambda: secrets.randbits(62))
    losses: int = 0
    avoid: set[str] = field(default_factory=set[str])

    @property
    def begun(self) -> bool:
        """Whether there is something to be continued."""
        return any(sample.token_ids or sample.finish_reason for sample in self.samples)


@dataclass(slots=True)
class RequestContext:
    """One request on its way through the stages."""

    input: RequestInput
    state: RequestState = field(default_factory=RequestState)

    @property
    def prepared(self) -> PreparedRequest:
        """What preparation found."""
        assert self.state.prepared is not None, "preparation comes first"
        return self.state.prepared

    @property
    def placed(self) -> PlacedRequest:
        """What worker selection found."""
        assert self.state.placed is not None, "worker selection comes first"
        return self.state.placed

    @property
    def message(self) -> pb.GenerateRequest:
        """What request building made."""
        assert self.state.message is not None, "request building comes first"
        return self.state.message


class PipelineStage(Protocol):
    """One step; `name` is its label in metrics."""

    name: str

    async def run(self, context: RequestContext) -> None:
        """Do it.

        Raises:
            RequestError: The request cannot be served.
            CapacityError: Not now.
            UpstreamError: The worker failed; another may not.
        """
        ...


def garbage(why: str) -> UpstreamError:
    """A worker sent something that it must not send."""
    return UpstreamError(f"The worker sent garbage: {why}", kind="protocol")

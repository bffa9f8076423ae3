"""The state that a request carries from stage to stage."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sylvan.gateway.errors import UpstreamError
from sylvan.gateway.grpc.prefill import Prefill
from sylvan.gateway.http.answer import Answer
from sylvan.gateway.http.caller import Caller
from sylvan.gateway.http.parsed_body import ParsedBody
from sylvan.gateway.http.routes import ProxyRoute
from sylvan.gateway.observe.meter import RequestMeter
from sylvan.gateway.placement import PlacedRequest
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
"""The only route that returns embeddings."""


@dataclass(frozen=True, slots=True)
class RequestInput:
    """The incoming request, and the sink for its answer.

    Attributes:
        caller: The client.
        route: The requested route.
        parsed: The body.
        answer: The answer to the client.
        meter: Records metrics of the request.
    """

    caller: Caller
    route: ProxyRoute
    parsed: ParsedBody
    answer: Answer
    meter: RequestMeter


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleText:
    """The next piece of one sample's text.

    Attributes:
        index: Index of the sample.
        text: New text.
        token_ids: New token IDs.
        usage: Token counts so far.
        finish: Finish reason, in the last delta.
        logprobs: Log probabilities of the new IDs, if requested.
        prompt_logprobs: Those of the prompt, if requested; sent once.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    usage: Usage
    finish: Finish | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None


class ReplyFormat(Protocol):
    """Formats the answer of one route."""

    def events(self, delta: SampleText) -> bytes:
        """Return the stream events for a delta; empty if none is due."""
        ...

    def end(self) -> bytes:
        """Return the end of a stream."""
        ...

    def whole(self) -> Any:
        """Return the whole answer as JSON, once every sample has ended."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedRequest:
    """A request as token IDs.

    Attributes:
        model: Model name by which workers are selected.
        text: Text processing of the model.
        input_ids: The prompt.
        sampling: Sampling parameters.
        detokenizer: How IDs are decoded.
        rules: How the text is parsed into an answer.
        format: Formats the answer.
        namespace: Cache namespace; prompts of different namespaces share no cached prefix.
        logprobs: Requested log probabilities.
        thinking: Where the answer contains reasoning.
        adapter: Name of the LoRA adapter; None: the base model.
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
    """The progress of one sample; see `sylvan.gateway.grpc.samples`."""

    token_ids: list[int]
    usage: Usage
    finish_reason: str

    def take(self, part: pb.GenerateStreamChunk | pb.GenerateComplete) -> SampleText:
        """Apply a reply of the worker."""
        ...

    def emitted(self, index: int) -> pb.EmittedSample:
        """Return the state that another worker needs to continue the sample."""
        ...


@dataclass(slots=True)
class RequestState:
    """Results of the stages; a new attempt replaces those of the attempt before.

    Attributes:
        prepared: Result of preparation.
        placed: Result of worker selection.
        dispatch: Counts the request against its worker, until it is closed.
        prefill: The prefill worker of a pair; `placed` is then the decode worker.
        client: Result of client acquisition.
        message: Result of request building.
        metadata: Result of dispatch metadata.
        replies: Result of request execution; the first reply has been read.
        samples: Progress of the samples; kept across attempts.
        seed: Sampling seed, if neither the client nor the operator sets one.
        losses: Workers lost in a row without progress.
        avoid: IDs of workers that failed.
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
        """Whether there is output that another worker can continue."""
        return any(sample.token_ids or sample.finish_reason for sample in self.samples)


@dataclass(slots=True)
class RequestContext:
    """One request on its way through the stages."""

    input: RequestInput
    state: RequestState = field(default_factory=RequestState)

    @property
    def prepared(self) -> PreparedRequest:
        """The result of preparation."""
        assert self.state.prepared is not None, "preparation comes first"
        return self.state.prepared

    @property
    def placed(self) -> PlacedRequest:
        """The result of worker selection."""
        assert self.state.placed is not None, "worker selection comes first"
        return self.state.placed

    @property
    def message(self) -> pb.GenerateRequest:
        """The result of request building."""
        assert self.state.message is not None, "request building comes first"
        return self.state.message


class PipelineStage(Protocol):
    """One stage; `name` is its label in metrics."""

    name: str

    async def run(self, context: RequestContext) -> None:
        """Run the stage.

        Raises:
            RequestError: The request cannot be served.
            CapacityError: The request cannot be served now.
            UpstreamError: The worker failed; another may succeed.
        """
        ...


def garbage(why: str) -> UpstreamError:
    """Build the error for an invalid message of a worker."""
    return UpstreamError(f"The worker sent an invalid message: {why}", kind="protocol")

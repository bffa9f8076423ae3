"""Stage 4: builds the message to the worker."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.struct_pb2 import Struct

from sylvan.gateway.grpc.context import RequestContext
from sylvan.protocol.errors import RequestError
from sylvan.protocol.requests import ThinkingOptions
from sylvan.protocol.sampling import SamplingParams
from sylvan.rpc import scheduler_pb2 as pb

_SAME_NAME = (
    *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty"),
    *("repetition_penalty", "n", "min_new_tokens", "ignore_eos", "no_stop_trim"),
    *("skip_special_tokens", "spaces_between_special_tokens", "max_new_tokens", "stop"),
    *("stop_token_ids", "logit_bias", "stream_interval", "sampling_seed"),
)
_GRAMMARS = {
    "regex": "regex",
    "json_schema": "json_schema",
    "ebnf": "ebnf_grammar",
    "structural_tag": "structural_tag",
}


class RequestBuilding:
    """Builds the `GenerateRequest`; it always asks the worker for a stream."""

    name = "request_building"

    async def run(self, context: RequestContext) -> None:
        prepared, state = context.prepared, context.state
        emitted = state.samples if state.begun else ()
        wanted, thinking = prepared.logprobs, prepared.thinking
        thinks = thinking is not None and bool(thinking.inside or thinking.starts)
        context.state.message = pb.GenerateRequest(
            request_id=context.input.caller.request_id,
            tokenized=pb.TokenizedInput(input_ids=prepared.input_ids),
            sampling_params=sampling_message(prepared.sampling),
            return_logprob=wanted is not None,
            logprob_start_len=-1 if wanted is None or wanted.start is None else wanted.start,
            top_logprobs_num=wanted.top if wanted is not None else 0,
            token_ids_logprob=wanted.token_ids if wanted is not None else (),
            stream=True,
            emitted=[sample.emitted(index) for index, sample in enumerate(emitted)],
            default_seed=state.seed,
            lora_id=prepared.adapter or "",
            # other servers detect the end of thinking themselves, which starts the grammar
            require_reasoning=thinks and prepared.sampling.grammar is not None,
            thinking=thinking_message(thinking) if thinking is not None else None,
            disaggregated_params=None if state.prefill is None else state.prefill.meeting(),
        )


def thinking_message(thinking: ThinkingOptions) -> pb.Thinking:
    """Encode where an answer contains reasoning."""

    def rows(marks: Sequence[Sequence[int]]) -> list[pb.TokenIds]:
        return [pb.TokenIds(ids=ids) for ids in marks]

    return pb.Thinking(
        ends=rows(thinking.ends),
        starts=rows(thinking.starts),
        headers=rows(thinking.headers),
        inside=thinking.inside,
    )


def sampling_message(sampling: SamplingParams) -> pb.SamplingParams:
    """Encode the sampling parameters.

    Raises:
        RequestError: The message has no field for a parameter.
    """
    for name in ("stop_regex", "choice"):
        if getattr(sampling, name):
            message = f"{name} is not passed on to workers that speak gRPC."
            raise RequestError(message, param=name, status=501)
    made = pb.SamplingParams(**{name: getattr(sampling, name) for name in _SAME_NAME})
    for ours, theirs in _GRAMMARS.items():
        if text := getattr(sampling, ours):
            setattr(made, theirs, text)
    if sampling.custom_params:
        custom = Struct()
        custom.update(sampling.custom_params)
        made.custom_params.CopyFrom(custom)
    return made

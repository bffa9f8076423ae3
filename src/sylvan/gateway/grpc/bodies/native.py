"""`/generate` over gRPC."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sylvan.api.native import GenerateBody, RequestBodyLimits, read_prompts
from sylvan.api.native_reply import ReplyOptions, ReplyState
from sylvan.api.validation import parse
from sylvan.gateway.grpc.bodies.common import (
    DONE,
    EventHeader,
    adapter_of,
    check_passed,
    collected,
    detokenizer_options,
    event,
    single_prompt,
)
from sylvan.gateway.grpc.context import PreparedRequest, RequestInput, SampleText
from sylvan.gateway.text.model import ModelText
from sylvan.protocol.errors import RequestError
from sylvan.protocol.sampling import MAX_N
from sylvan.text.output import OutputRules

PASSED = frozenset(
    {
        *("text", "input_ids", "sampling_params", "stream", "model", "rid", "return_logprob"),
        *("logprob_start_len", "top_logprobs_num", "token_ids_logprob", "return_text_in_logprobs"),
        "lora_path",
    }
)
MAX_TOP = 1024
"""Most alternatives per token; the worker's own limit is lower."""
_NEUTRAL: Sequence[object] = (None, False, [], {}, "", 0, -1)


async def prepare(
    given: RequestInput, text: ModelText, model: str | None, frame: EventHeader
) -> PreparedRequest:
    """Parse a body.

    Raises:
        RequestError: The body is invalid; the message names the field and the reason.
    """
    body = parse(GenerateBody, given.parsed.fields)
    check_passed(body, PASSED, _NEUTRAL)
    prompts, is_batch = read_prompts(
        body, {}, RequestBodyLimits(max_samples=MAX_N, max_top_logprobs=MAX_TOP)
    )
    prompt = single_prompt(prompts, "text" if body.text is not None else "input_ids")
    ids = prompt.input_ids if prompt.text is None else await text.ids.of(prompt.text)
    sampling = prompt.sampling
    name = prompt.rid or given.caller.request_id
    many = is_batch or sampling.n > 1
    wanted = prompt.logprobs
    if wanted is not None and wanted.start is not None and wanted.token_ids:
        message = "token_ids_logprob: workers over gRPC return these for outputs only."
        raise RequestError(message, param="token_ids_logprob", status=501)
    options = ReplyOptions(
        logprobs=wanted is not None,
        top=wanted is not None and wanted.top > 0,
        wanted_ids=wanted.token_ids if wanted is not None else (),
        text_of=text.tokenizer.token_text if body.return_text_in_logprobs else None,
    )
    return PreparedRequest(
        model=model,
        text=text,
        input_ids=ids,
        sampling=sampling,
        detokenizer=detokenizer_options(sampling),
        rules=OutputRules(),
        format=NativeFormat(name, sampling.n, options, many=many),
        namespace=given.parsed.namespace,
        logprobs=wanted,
        adapter=adapter_of(given.parsed, model, prompt.lora),
    )


class NativeFormat:
    """Formats the answer of `/generate`; stream events contain the whole text so far."""

    def __init__(self, name: str, n: int, options: ReplyOptions, *, many: bool) -> None:
        self._name = name
        self._samples = collected(n)
        self._replies = [ReplyState(options) for _ in range(n)]
        self._many = many

    def events(self, delta: SampleText) -> bytes:
        self._samples[delta.index].add(delta)
        self._replies[delta.index].add(
            delta.text, delta.token_ids, delta.logprobs, delta.prompt_logprobs
        )
        if not delta.token_ids and delta.finish is None:
            return b""
        reply = self._reply(delta.index)
        return event({**reply, "index": delta.index} if self._many else reply)

    def end(self) -> bytes:
        return DONE

    def whole(self) -> Any:
        replies = [self._reply(index) for index in range(len(self._samples))]
        return replies if self._many else replies[0]

    def _reply(self, index: int) -> dict[str, Any]:
        sample = self._samples[index]
        return self._replies[index].reply(self._name, sample.usage, sample.finish, {})

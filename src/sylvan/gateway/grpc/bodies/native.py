"""`/generate` over gRPC."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sylvan.api.native import GenerateBody, Limits, read_prompts
from sylvan.api.native_reply import finish_reason
from sylvan.api.validation import parse
from sylvan.gateway.grpc.bodies.common import (
    DONE,
    Collected,
    Frame,
    check_passed,
    collected,
    detokenizer_options,
    event,
    single_prompt,
)
from sylvan.gateway.grpc.context import Prepared, RequestInput, SampleDelta
from sylvan.gateway.text.model import ModelText
from sylvan.protocol.sampling import MAX_N
from sylvan.text.output import OutputRules

PASSED = frozenset({"text", "input_ids", "sampling_params", "stream", "model", "rid"})
_NEUTRAL: Sequence[object] = (None, False, [], {}, "", 0, -1)


async def prepare(
    given: RequestInput, text: ModelText, model: str | None, frame: Frame
) -> Prepared:
    """Read a body.

    Raises:
        RequestError: Names the field, and what is wrong with it.
    """
    body = parse(GenerateBody, given.asked.fields)
    check_passed(body, PASSED, _NEUTRAL)
    prompts, is_batch = read_prompts(body, {}, Limits(max_samples=MAX_N, max_top_logprobs=0))
    prompt = single_prompt(prompts, "text" if body.text is not None else "input_ids")
    ids = prompt.input_ids if prompt.text is None else await text.ids.of(prompt.text)
    sampling = prompt.sampling
    name = prompt.rid or given.caller.request_id
    many = is_batch or sampling.n > 1
    return Prepared(
        model=model,
        text=text,
        input_ids=ids,
        sampling=sampling,
        detokenizer=detokenizer_options(sampling),
        rules=OutputRules(),
        format=NativeFormat(name, sampling.n, many=many),
        namespace=given.asked.namespace,
    )


class NativeFormat:
    """The answer of `/generate`: streams have the text so far."""

    def __init__(self, name: str, n: int, *, many: bool) -> None:
        self._name = name
        self._samples = collected(n)
        self._many = many

    def events(self, delta: SampleDelta) -> bytes:
        """See `ReplyFormat.events`."""
        sample = self._samples[delta.index]
        sample.add(delta)
        if not delta.token_ids and delta.finish is None:
            return b""
        reply = self._reply(sample)
        return event({**reply, "index": delta.index} if self._many else reply)

    def end(self) -> bytes:
        """See `ReplyFormat.end`."""
        return DONE

    def whole(self) -> Any:
        """See `ReplyFormat.whole`."""
        replies = [self._reply(sample) for sample in self._samples]
        return replies if self._many else replies[0]

    def _reply(self, sample: Collected) -> dict[str, Any]:
        usage = sample.usage
        return {
            "text": sample.text,
            "output_ids": sample.token_ids,
            "meta_info": {
                "id": self._name,
                "finish_reason": finish_reason(sample.finish) if sample.finish else None,
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "cached_tokens": usage.cached_tokens,
            },
        }

"""`/v1/chat/completions` over gRPC."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from sylvan.api.answering import AnswerRequest, plan_answer
from sylvan.api.openai.chat import ChatBody
from sylvan.api.openai.chat_logprobs import ChatLogprobs
from sylvan.api.openai.chat_tools import tool_use
from sylvan.api.openai.common import openai_sampling, usage_reply
from sylvan.api.sampling import SamplingDefaults
from sylvan.api.validation import parse
from sylvan.gateway.grpc.bodies.common import (
    DONE,
    EventHeader,
    adapter_of,
    check_passed,
    collected,
    detokenizer_options,
    event,
    usage_of,
)
from sylvan.gateway.grpc.context import PreparedRequest, RequestInput, SampleText
from sylvan.gateway.text.chat import last_text, template_request
from sylvan.gateway.text.model import ModelText
from sylvan.protocol.errors import RequestError
from sylvan.protocol.messages import Finish
from sylvan.protocol.requests import LogprobOptions
from sylvan.text.output import OutputReader, OutputRules, ParsedOutput, Piece, ReasoningDelta
from sylvan.text.tools import CallStart, TextDelta, ToolFamily
from sylvan.utils.threads import call_in_thread

PASSED = frozenset(
    {
        *("model", "messages", "max_tokens", "max_completion_tokens", "min_tokens", "n", "user"),
        *("stream", "stream_options", "temperature", "top_p", "top_k", "min_p", "seed", "stop"),
        *("frequency_penalty", "presence_penalty", "repetition_penalty", "stop_token_ids"),
        *("ignore_eos", "no_stop_trim", "skip_special_tokens", "logit_bias", "stream_interval"),
        *("custom_params", "regex", "ebnf", "json_schema", "structural_tag", "response_format"),
        *("tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "metadata"),
        "lora_path",
        *("separate_reasoning", "stream_reasoning", "continue_final_message"),
        *("logprobs", "top_logprobs"),
        *("add_generation_prompt", "reasoning_effort", "enable_thinking", "store"),
    }
)
_NEUTRAL: Sequence[object] = (None, False, [], {}, "", 0)


async def prepare(
    given: RequestInput, text: ModelText, model: str | None, frame: EventHeader
) -> PreparedRequest:
    """Parse a body, and render its messages.

    Raises:
        RequestError: The body is invalid; the message names the field and the reason.
    """
    body = parse(ChatBody, given.parsed.fields)
    check_passed(body, PASSED, _NEUTRAL)
    use = tool_use(body)
    request = template_request(body, use)
    prompt = await call_in_thread(text.template.render, request)
    plan = plan_answer(
        text.parsers,
        AnswerRequest(
            sampling=_sampling(body),
            tool_use=use,
            variables=request.kwargs or {},
            continued=last_text(request) if request.continue_final_message else None,
            separate_reasoning=body.separate_reasoning is not False,
            stream_reasoning=body.stream_reasoning is not False,
        ),
        prompt.text,
    )
    sampling, rules = plan.sampling, plan.rules
    usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    wanted = _logprobs(body)
    logs: list[ChatLogprobs | None] = [None] * sampling.n
    if wanted is not None:
        skip = sampling.skip_special_tokens
        logs = [ChatLogprobs(text.tokenizer, skip_special_tokens=skip, every=False) for _ in logs]
    maker = ChatFormat(given.caller.request_id, frame, logs, rules, usage=usage)
    return PreparedRequest(
        model=model,
        text=text,
        input_ids=prompt.input_ids,
        sampling=sampling,
        detokenizer=detokenizer_options(sampling),
        rules=rules,
        format=maker,
        namespace=given.parsed.namespace,
        logprobs=wanted,
        thinking=plan.thinking,
        adapter=adapter_of(given.parsed, model, body.lora_path),
    )


def _logprobs(body: ChatBody) -> LogprobOptions | None:
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true.", param="top_logprobs")
    return LogprobOptions(top=body.top_logprobs or 0) if body.logprobs else None


def _sampling(body: ChatBody) -> Any:
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return openai_sampling(body, SamplingDefaults(), limit, name)


class ChatFormat:
    """Formats the answer of `/v1/chat/completions`."""

    def __init__(
        self,
        name: str,
        frame: EventHeader,
        logs: Sequence[ChatLogprobs | None],
        rules: OutputRules,
        *,
        usage: bool,
    ) -> None:
        """Take one entry of `logs` per sample; None: no log probabilities were requested."""
        n = len(logs)
        self._logs = logs
        self._shown: list[list[dict[str, Any]]] = [[] for _ in logs]
        self._frame: dict[str, Any] = {"id": name, "created": frame.created, "model": frame.model}
        self._samples = collected(n)
        self._readers = [OutputReader(rules) for _ in range(n)]
        self._answers = [ParsedOutput() for _ in range(n)]
        self._begun = [False] * n
        self._family = rules.tools
        self._usage = usage

    def events(self, delta: SampleText) -> bytes:
        self._samples[delta.index].add(delta)
        reader = self._readers[delta.index]
        pieces = reader.feed(delta.text)
        if delta.finish is not None:
            pieces += reader.finish()
        self._answers[delta.index].add(pieces)
        return b"".join(event(chunk) for chunk in self._chunks(delta, pieces))

    def end(self) -> bytes:
        last: dict[str, Any] = {**self._chunk_frame, "choices": [], "usage": self._counts()}
        return (event(last) if self._usage else b"") + DONE

    def whole(self) -> Any:
        choices = [self._choice(index) for index in range(len(self._samples))]
        frame = {**self._frame, "object": "chat.completion"}
        return {**frame, "choices": choices, "usage": self._counts()}

    @property
    def _chunk_frame(self) -> dict[str, Any]:
        return {**self._frame, "object": "chat.completion.chunk"}

    def _chunks(self, delta: SampleText, pieces: list[Piece]) -> Iterator[dict[str, Any]]:
        index = delta.index
        if not self._begun[index]:
            self._begun[index] = True
            yield self._chunk(index, {"role": "assistant", "content": ""})
        logprobs = self._logprobs(delta)
        deltas = [self._delta(piece) for piece in pieces]
        if not deltas and logprobs and logprobs["content"]:
            deltas = [{"content": ""}]
        for content in deltas:
            yield self._chunk(index, content, logprobs=logprobs)
            logprobs = None
        if delta.finish is not None:
            calls = self._readers[index].has_calls
            reason, matched = finish_name(delta.finish, calls=calls), delta.finish.matched
            yield self._chunk(index, {}, finish_reason=reason, matched_stop=matched)

    def _logprobs(self, delta: SampleText) -> dict[str, Any] | None:
        """Return the log probabilities of the text that became visible."""
        log = self._logs[delta.index]
        if log is None:
            return None
        parts = [] if delta.logprobs is None else [delta.logprobs]
        spans = self._readers[delta.index].spans()
        found = log.reply(delta.token_ids, parts, delta.text, spans)
        self._shown[delta.index] += found["content"]
        return found

    def _chunk(self, index: int, content: dict[str, Any], **fields: Any) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": {"content": None, "reasoning_content": None, **content},
            "logprobs": None,
            "finish_reason": None,
            "matched_stop": None,
            **fields,
        }
        return {**self._chunk_frame, "choices": [choice]}

    def _delta(self, piece: Piece) -> dict[str, Any]:
        if isinstance(piece, ReasoningDelta):
            return {"reasoning_content": piece.text}
        if isinstance(piece, TextDelta):
            return {"content": piece.text}
        call: dict[str, Any] = {"index": piece.index}
        if isinstance(piece, CallStart):
            call["id"] = call_id(self._family, piece.name, piece.index)
            call["type"] = "function"
            call["function"] = {"name": piece.name, "arguments": ""}
        else:
            call["function"] = {"arguments": piece.fragment}
        return {"tool_calls": [call]}

    def _choice(self, index: int) -> dict[str, Any]:
        answer, finish = self._answers[index], self._samples[index].finish
        message: dict[str, Any] = {
            "role": "assistant",
            "content": answer.text if answer.text or not answer.calls else None,
            "reasoning_content": answer.reasoning or None,
        }
        if answer.calls:
            message["tool_calls"] = [
                {
                    "id": call_id(self._family, call.name, i),
                    "type": "function",
                    "index": i,
                    "function": {"name": call.name, "arguments": call.arguments or "{}"},
                }
                for i, call in enumerate(answer.calls)
            ]
        return {
            "index": index,
            "message": message,
            "logprobs": None if self._logs[index] is None else {"content": self._shown[index]},
            "finish_reason": finish_name(finish, calls=bool(answer.calls)),
            "matched_stop": finish.matched if finish else None,
        }

    def _counts(self) -> dict[str, Any]:
        return usage_reply(usage_of(self._samples), len(self._samples), cached=True)


def finish_name(finish: Finish | None, *, calls: bool) -> str | None:
    """Return the `finish_reason` of a chat choice."""
    if finish is None:
        return None
    return "tool_calls" if calls and finish.type == "stop" else finish.type


def call_id(family: ToolFamily | None, name: str, index: int) -> str:
    """Make the ID of a tool call; some model families require their own format."""
    if family is not None and family.call_id is not None:
        return family.call_id.format(name=name, index=index)
    return f"call_{secrets.token_hex(12)}"

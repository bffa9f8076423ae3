"""`/v1/completions`."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.responses import Response

from sylvan.api.errors import Family, error_body
from sylvan.api.logprobs import CompletionLogprobs, CompletionToken
from sylvan.api.openai.common import (
    adapter_fields,
    grammar_fields,
    openai_sampling,
    salt_of,
)
from sylvan.api.openai.completion_logprobs import CompletionTokenLog
from sylvan.api.openai.completions import DEFAULT_MAX_TOKENS, CompletionBody, prompts_of
from sylvan.api.request_fields import request_options
from sylvan.protocol.errors import RequestError, SylvanError
from sylvan.protocol.messages import Finish
from sylvan.protocol.requests import LogprobOptions
from sylvan.runtime.server.adapters import adapter_of
from sylvan.runtime.server.endpoint import Call, error_code, error_parts, json_response
from sylvan.runtime.server.openai.meta import weight_metadata
from sylvan.runtime.server.openai.sglext import ResponseExtras
from sylvan.runtime.server.openai.usage import UsageCounter, model_name, stream_usage
from sylvan.runtime.server.sse import DONE, PLACEHOLDER, EventTemplate, event
from sylvan.runtime.server.streaming import EventStream, await_first_chunk, cancel_on_disconnect
from sylvan.runtime.serving.samples import Sample, collect, stream
from sylvan.runtime.tokenizer.types import GenerateInput, SampleDelta, error_of
from sylvan.text.fim import FIM_UNSUPPORTED, Infill
from sylvan.text.visible_tokens import VisibleTokens
from sylvan.utils.threads import call_in_thread


async def completions(call: Call[CompletionBody]) -> Response:
    """Create a completion for one prompt, or several."""
    job = _CompletionCall(call)
    if call.body.stream:
        chunks = await await_first_chunk(call.request, job.events(), openai_error_event)
        return EventStream(chunks)
    return json_response(await cancel_on_disconnect(call.request, job.reply()))


class _CompletionCall:
    """One call in progress."""

    def __init__(self, call: Call[CompletionBody]) -> None:
        body, context = call.body, call.context
        self._call, self._body, self._context = call, body, context
        call.names.update({**grammar_fields(body), **adapter_fields(body)})
        if body.best_of is not None:
            call.names["n"] = "best_of"
        self._prompts = prompts_of(body)
        self._best_of = self._check(body)
        self._sampling = openai_sampling(
            body,
            context.defaults,
            DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
            overrides={"n": self._best_of} if self._best_of else None,
        )
        self._samples = self._sampling.n
        total = len(self._prompts) * self._samples
        if total > context.limits.max_samples:
            most = context.limits.max_samples
            message = f"prompt: {total} samples are more than limits.samples={most}."
            raise RequestError(message, param="prompt", setting="limits.samples")
        self._id = body.rid or context.ids(16)
        self._created = int(context.wall())
        self._model = model_name(context, body)
        self._usage_counter = UsageCounter(call, len(self._prompts), self._samples)
        self._extras = ResponseExtras(call)
        self._versions: tuple[str, ...] = ()
        self._prompt_ids: list[tuple[int, ...]] = []
        self._prompt_texts: list[str] = []

    def _check(self, body: CompletionBody) -> int:
        """Return how many samples to generate if more than are returned (`best_of`); else 0."""
        limit = self._context.limits.max_top_logprobs
        if body.logprobs is not None and body.logprobs > limit:
            raise RequestError(f"logprobs: expected at most {limit}.", param="logprobs")
        if body.suffix and not Infill(self._context.engine.tokenizer):
            raise RequestError(FIM_UNSUPPORTED, param="suffix")
        if body.suffix and body.echo:
            raise RequestError("echo and suffix exclude each other.", param="echo")
        n = 1 if body.n is None else body.n
        if body.best_of is None or body.best_of == n:
            return 0
        if body.best_of < n:
            message = f"best_of: {body.best_of} is less than n ({n})."
            raise RequestError(message, param="best_of")
        if body.stream:
            raise RequestError("best_of cannot be streamed.", param="best_of")
        return body.best_of

    async def reply(self) -> dict[str, Any]:
        """Return the answer of a call without streaming."""
        results = await collect(self._context.service, await self._inputs())
        choices: list[dict[str, Any]] = []
        for prompt, samples in enumerate(results):
            for i, sample in enumerate(samples):
                delta = sample.last_delta(i)
                self._usage_counter.update(prompt, delta)
                self._extras.add(prompt * self._samples + i, sample.token_ids, sample.usage)
                self._see_versions(sample.weight_versions)
            choices += [
                self._choice(len(choices) + i, prompt, s)
                for i, s in enumerate(self._chosen(samples))
            ]
        return {
            **self._frame(choices),
            "usage": self._usage_counter.reply(),
            **self._extras.reply(),
        }

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the events of a streaming call."""
        usage_at_end, usage_always = stream_usage(self._context, self._body.stream_options)
        inputs = await self._inputs()
        writers = [_Writer(self, i // self._samples, i) for i in range(len(inputs) * self._samples)]
        started = False
        async with aclosing(stream(self._context.service, inputs)) as deltas:
            async for prompt, delta in deltas:
                if (error := error_of(delta.finish)) is not None:
                    raise error
                self._usage_counter.update(prompt, delta)
                place = prompt * self._samples + delta.index
                self._extras.add(place, delta.token_ids, delta.usage)
                self._see_versions(delta.weight_versions)
                usage = self._usage_counter.reply() if usage_always else None
                writer = writers[place]
                chunk = writer.write(delta, usage)
                if chunk or not started:
                    started = True
                    yield chunk
        if extras := self._extras.reply():
            yield event({**self._frame([]), **extras})
        if usage_at_end:
            yield event({**self._frame([]), "usage": self._usage_counter.reply()})
        yield DONE

    async def _inputs(self) -> list[GenerateInput]:
        body, engine = self._body, self._context.engine
        if body.suffix:
            encode = Infill(engine.tokenizer).encode
            parts = [(p, body.suffix) for p in self._prompts]
            self._prompts = [tuple(await call_in_thread(encode, *part)) for part in parts]
        if body.return_prompt_token_ids or body.echo or self._extras.wants_input:
            for prompt in self._prompts:
                is_text = isinstance(prompt, str)
                ids = tuple(await engine.tokenize(prompt)) if is_text else prompt
                self._prompt_ids.append(ids)
                self._extras.add_prompt(ids)
                text = prompt if is_text else await engine.detokenize(ids)
                self._prompt_texts.append(text)
        return [self._input(i) for i in range(len(self._prompts))]

    def _input(self, i: int) -> GenerateInput:
        body, prompt = self._body, self._prompts[i]
        wanted = body.logprobs is not None or self._best_of
        options = LogprobOptions(
            start=0 if body.echo and body.logprobs is not None else None, top=body.logprobs or 0
        )
        ids = self._prompt_ids[i] if self._prompt_ids else prompt
        return GenerateInput(
            text=ids if isinstance(ids, str) else None,
            input_ids=None if isinstance(ids, str) else ids,
            sampling=self._sampling,
            rid=self._id if len(self._prompts) == 1 else f"{self._id}_{i}",
            stream=bool(body.stream),
            logprobs=options if wanted else None,
            lora=adapter_of(self._call, body),
            tenant=self._call.tenant.name,
            cache_salt=salt_of(body),
            options=request_options(body),
        )

    def _chosen(self, samples: list[Sample]) -> list[Sample]:
        if not self._best_of:
            return samples
        ranked = sorted(samples, key=_mean_logprob, reverse=True)
        return ranked[: 1 if self._body.n is None else self._body.n]

    def _choice(self, index: int, prompt: int, sample: Sample) -> dict[str, Any]:
        logprobs = None
        if (log := self.token_log()) is not None:
            log.add_prompt(sample.prompt_logprobs)
            logprobs = log.reply(sample.token_ids, sample.logprobs, sample.text)
        echo = self._prompt_texts[prompt] if self._body.echo else ""
        choice = choice_of(index, echo + sample.text, logprobs, sample.finish)
        if self._body.return_token_ids:
            choice["token_ids"] = sample.token_ids
        if self._body.return_prompt_token_ids:
            choice["prompt_token_ids"] = self._prompt_ids[prompt]
        return choice

    def token_log(self) -> CompletionTokenLog | None:
        """Make the recorder of a choice's logprobs, if requested."""
        if self._body.logprobs is None:
            return None
        tokenizer = self._context.engine.tokenizer
        skip = self._sampling.skip_special_tokens
        visible = VisibleTokens[CompletionToken](tokenizer, skip_special_tokens=skip)
        return CompletionTokenLog(
            CompletionLogprobs(tokenizer.token_text, self._body.logprobs),
            # with echo, clients count tokens: each generated token has an entry, even the end token
            None if self._body.return_token_ids or self._body.echo else visible,
        )

    def _frame(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": choices,
            "metadata": weight_metadata(self._context, self._versions),
        }

    def _see_versions(self, versions: Sequence[str]) -> None:
        if self._versions[-1:] != tuple(versions[-1:]):
            self._versions = tuple(dict.fromkeys((*self._versions, *versions)))

    @property
    def versions(self) -> Sequence[str]:
        """Return the version labels of the weights that generated the text so far."""
        return self._versions

    def frame_event(self, choice: dict[str, Any], usage: dict[str, Any] | None) -> bytes:
        """Build one chunk of a stream."""
        frame = self._frame([choice])
        return event({**frame, "usage": usage} if usage is not None else frame)

    def text_template(self, index: int) -> EventTemplate:
        """Build chunks of choice `index` that contain only text."""
        return EventTemplate(self._frame([choice_of(index, PLACEHOLDER, None, None)]))

    def echo_of(self, prompt: int) -> str:
        """Return the text echoed before the answer."""
        return self._prompt_texts[prompt] if self._body.echo else ""

    @property
    def return_token_ids(self) -> bool:
        """Whether chunks contain token IDs."""
        return bool(self._body.return_token_ids)


class _Writer:
    """Builds the chunks of one choice."""

    def __init__(self, job: _CompletionCall, prompt: int, index: int) -> None:
        self._job = job
        self._index = index
        self._echo = job.echo_of(prompt)
        self._log = job.token_log()
        self._plain, self._versions = job.text_template(index), job.versions

    def write(self, delta: SampleDelta, usage: dict[str, Any] | None) -> bytes:
        """Return the chunk for a delta; None if there is nothing to send."""
        if self._versions is not self._job.versions:
            self._plain, self._versions = self._job.text_template(self._index), self._job.versions
        text, self._echo = self._echo + delta.text, ""
        special = self._log is not None or self._job.return_token_ids
        if delta.finish is None and usage is None and not special:
            return self._plain.fill(text) if text else b""
        choice = choice_of(self._index, text, self._logprobs(delta), delta.finish)
        if self._job.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return self._job.frame_event(choice, usage)

    def _logprobs(self, delta: SampleDelta) -> dict[str, Any] | None:
        if self._log is None:
            return None
        self._log.add_prompt(delta.prompt_logprobs)
        parts = [] if delta.logprobs is None else [delta.logprobs]
        found = self._log.reply(delta.token_ids, parts, delta.text)
        return found if found["tokens"] else None


def choice_of(
    index: int, text: str, logprobs: dict[str, Any] | None, finish: Finish | None
) -> dict[str, Any]:
    """Build one entry of `choices`."""
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": finish.type if finish else None,
        "matched_stop": finish.matched if finish else None,
    }


def openai_error_event(error: SylvanError) -> bytes:
    """Return the last event of a failed stream."""
    status, message, param = error_parts(error)
    code = error_code(error)
    flat = error_body(Family.OPENAI, status, message, param=param, code=code)
    del flat["error"]
    return event({"error": flat}) + DONE


def _mean_logprob(sample: Sample) -> float:
    total = sum(float(part.logprobs.sum()) for part in sample.logprobs)
    count = sum(len(part.logprobs) for part in sample.logprobs)
    return total / count if count else -math.inf

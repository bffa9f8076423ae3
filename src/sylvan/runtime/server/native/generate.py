"""`/generate`: one prompt or many, whole answers or streams."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from starlette.responses import Response

from sylvan.api.answering import Bound, thinking_of
from sylvan.api.errors import Family, error_body
from sylvan.api.native import GenerateBody, Prompt, read_prompts, session_of
from sylvan.api.native_reply import ReplyOptions, ReplyState, timing_keys
from sylvan.protocol.errors import RequestError, SylvanError
from sylvan.protocol.messages import Finish
from sylvan.protocol.requests import Thinking
from sylvan.runtime.server.endpoint import Call, error_parts, json_response
from sylvan.runtime.server.native.sessions import begin_turn
from sylvan.runtime.server.samples import Sample, collect, stream
from sylvan.runtime.server.sse import DONE, event
from sylvan.runtime.server.stores.sessions import Turn
from sylvan.runtime.server.streaming import EventStream, primed, unless_gone
from sylvan.runtime.tokenizer.types import GenerateInput, SampleDelta, error_of
from sylvan.text.reasoning.tokens import ReasoningCounter, ending


async def generate(call: Call[GenerateBody]) -> Response:
    """Continue one prompt, or a list of prompts."""
    job, detached = Job(call, call.body), call.context.detached
    goes_on = bool(call.body.background)
    if call.body.stream:
        events = detached.stream(job.events()) if goes_on else job.events()
        chunks = await primed(call.request, events, native_error_event)
        return EventStream(chunks)
    work = detached.whole(job.replies()) if goes_on else job.replies()
    return json_response(await unless_gone(call.request, work))


class Job:
    """One `/generate` call under way, whatever route it came by."""

    def __init__(self, call: Call[Any], body: GenerateBody) -> None:
        """Read the prompts of `body`.

        Raises:
            RequestError: Names the field and the limit.
        """
        context = call.context
        self._call = call
        self._context = context
        self._body = body
        self._session = session_of(body)
        self._turn: Turn | None = None
        self._prompts, self._batch = read_prompts(body, context.defaults.preferred, context.limits)
        self._tenant = call.tenant
        self._n = self._prompts[0].sampling.n
        self._began = context.clock()
        if self._session is not None and self._batch:
            raise RequestError("session_params needs a single prompt.", param="session_params")

    @property
    def num_samples(self) -> int:
        """Prompts times samples."""
        return self._n * len(self._prompts)

    async def replies(self) -> Any:
        """The object, or the list of objects, of a call without streaming."""
        inputs, prompt_ids = await self._inputs()
        with self._context.sessions.recorded(self._turn):
            samples = await collect(self._context, inputs)
            self._record(samples[0][0].token_ids, samples[0][0].finish)
        replies = [
            self._whole(j, sample, self._options(i, prompt_ids), self._counter(inputs[i]))
            for i, of_prompt in enumerate(samples)
            for j, sample in enumerate(of_prompt)
        ]
        return replies if self._batch or self._n > 1 else replies[0]

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events of a streaming call."""
        inputs, prompt_ids = await self._inputs()
        many = self._batch or self._n > 1
        cumulative = not self._context.settings.incremental_streaming_output
        states = [
            ReplyState(self._options(i, prompt_ids, j if many else None), cumulative)
            for j, i in enumerate(i for i in range(len(inputs)) for _ in range(self._n))
        ]
        counters = [self._counter(inp) for inp in inputs for _ in range(self._n)]
        started = False
        with self._context.sessions.recorded(self._turn):
            async with aclosing(stream(self._context, inputs)) as deltas:
                async for prompt, delta in deltas:
                    if not started and (error := error_of(delta.finish)) is not None:
                        raise error
                    started = True
                    self._record(delta.token_ids, delta.finish)
                    place = prompt * self._n + delta.index
                    state = states[place]
                    counters[place].add(delta.token_ids)
                    state.reasoning_tokens = counters[place].count
                    state.add(delta.text, delta.token_ids, delta.logprobs, delta.prompt_logprobs)
                    yield event(self._reply(state, delta))
        yield DONE

    def _record(self, ids: Sequence[int], finish: Finish | None) -> None:
        """Before a client hears of the end it can go on from there."""
        if self._turn is not None:
            self._context.sessions.extend(self._turn, ids)
            if finish is not None:
                self._context.sessions.end(self._turn, aborted=finish.type == "abort")

    async def _inputs(self) -> tuple[list[GenerateInput], Sequence[Sequence[int]] | None]:
        """What goes to the engine, and the ids of the prompts if the client wants them."""
        prompt_ids: list[Sequence[int]] | None = None
        if self._session is not None:
            self._turn = await begin_turn(self._call, self._session, self._prompts[0])
            prompt = replace(self._prompts[0], rid=self._turn.rid)
            ids = self._turn.prompt.tolist()
            shown = [ids] if self._body.return_prompt_token_ids else None
            return [self._input(prompt, ids)], shown
        if self._body.return_prompt_token_ids:
            tokenize = self._context.engine.tokenize
            prompt_ids = [
                p.input_ids if p.text is None else await tokenize(p.text) for p in self._prompts
            ]  # type: ignore[assignment]
        return [
            self._input(p, prompt_ids[i] if prompt_ids else None)
            for i, p in enumerate(self._prompts)
        ], prompt_ids

    def _input(self, prompt: Prompt, ids: Sequence[int] | None) -> GenerateInput:
        given = ids if ids is not None else prompt.input_ids
        return GenerateInput(
            text=prompt.text if given is None else None,
            input_ids=given,
            sampling=prompt.sampling,
            rid=prompt.rid,
            stream=bool(self._body.stream),
            logprobs=prompt.logprobs,
            lora=prompt.lora,
            tenant=self._tenant.name,
            cache_salt=prompt.cache_salt,
            priority=self._body.priority or 0,
            deadline_s=self._body.timeout,
            ttft_ms=self._body.ttft_ms,
            tpot_ms=self._body.tpot_ms,
            thinking=self._thinking(prompt),
            media=prompt.media,
        )

    def _thinking(self, prompt: Prompt) -> Thinking | None:
        parsers, budget = self._context.parsers, self._body.max_thinking_tokens
        inside, opens = bool(self._body.require_reasoning), False
        if parsers.reasoning is None or (budget is None and not inside):
            return None
        if not inside:
            tokenizer = self._context.engine.tokenizer
            text = prompt.text or ending(tokenizer, prompt.input_ids or ())
            inside = parsers.reasoning.starts_in_reasoning(text)
            opens = parsers.reasoning.may_start_reasoning(text)
        bound = Bound(may_open=opens) if prompt.sampling.grammar is not None else None
        return thinking_of(parsers, inside=inside, budget=budget, bound=bound)

    def _options(
        self, i: int, prompt_ids: Sequence[Sequence[int]] | None, index: int | None = None
    ) -> ReplyOptions:
        logprobs = self._prompts[i].logprobs
        with_text = bool(self._body.return_text_in_logprobs) and logprobs is not None
        return ReplyOptions(
            logprobs=logprobs is not None,
            top=logprobs is not None and logprobs.top > 0,
            wanted_ids=logprobs.token_ids if logprobs is not None else (),
            text_of=self._context.engine.tokenizer.token_text if with_text else None,
            prompt_ids=prompt_ids[i] if prompt_ids else None,
            index=index,
            weight_version=self._context.engine.router.weight_version,
        )

    def _counter(self, inp: GenerateInput) -> ReasoningCounter:
        """Counts the thinking of a sample, which its prompt may have begun."""
        marks, tokenizer = self._context.parsers.marks, self._context.engine.tokenizer
        inside = bool(self._body.require_reasoning)
        if marks is not None and not inside:
            inside = marks.is_open(inp.text, inp.input_ids or (), tokenizer)
        return ReasoningCounter(marks, inside=inside)

    def _whole(
        self, index: int, sample: Sample, options: ReplyOptions, counter: ReasoningCounter
    ) -> dict[str, Any]:
        counter.add(sample.token_ids)
        state = ReplyState(options, reasoning_tokens=counter.count)
        state.add(sample.text, sample.token_ids, None, sample.prompt_logprobs)
        for part in sample.logprobs:
            state.add("", (), part, None)
        return self._reply(state, sample.last_delta(index))

    def _reply(self, state: ReplyState, delta: SampleDelta) -> dict[str, Any]:
        timing: dict[str, float] = {}
        if delta.finish is not None:
            context, tokens = self._context, delta.usage.completion_tokens
            elapsed_s = context.clock() - self._began
            timing = timing_keys(delta.timing, elapsed_s, context.wall(), tokens)
        state.weight_versions = delta.weight_versions
        return state.reply(delta.rid, delta.usage, delta.finish, timing)


def native_error_event(error: SylvanError) -> bytes:
    """The end of a native stream that failed."""
    status, message, param = error_parts(error)
    return event(error_body(Family.NATIVE, status, message, param=param)) + DONE

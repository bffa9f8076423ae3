"""`/generate`: one prompt or many, whole answers or streams of them."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from sylvan.api.answering import GrammarWithThinking, thinking_of
from sylvan.api.native import GenerateBody, Prompt, SessionParams, read_prompts, session_of
from sylvan.api.native_reply import ReplyOptions, ReplyState, timing_keys
from sylvan.api.request_fields import request_options
from sylvan.protocol.errors import RequestError
from sylvan.protocol.messages import Finish
from sylvan.protocol.requests import ThinkingOptions
from sylvan.runtime.serving.samples import Sample, collect, stream
from sylvan.runtime.serving.service import GenerationService
from sylvan.runtime.serving.sessions import NewTurn, Turn
from sylvan.runtime.tokenizer.types import GenerateInput, SampleDelta, error_of
from sylvan.text.reasoning.tokens import ReasoningCounter, ending

Reply = dict[str, Any]


class NativeCall:
    """One call of `/generate`, over any transport.

    Args:
        service: The generation service.
        body: The validated body.
        tenant: Tenant of the call.

    Raises:
        RequestError: The body is inconsistent; the message names the field and the limit.
    """

    def __init__(self, service: GenerationService, body: GenerateBody, tenant: str = "") -> None:
        self._service, self._body, self._tenant = service, body, tenant
        self._session = session_of(body)
        self._turn: Turn | None = None
        preferred, limits = service.defaults.preferred, service.limits
        self._prompts, self._is_batch = read_prompts(body, preferred, limits)
        _check_thinking(service, body, self._prompts)
        self._n = self._prompts[0].sampling.n
        self._began_s = service.clock()
        if self._session is not None and self._is_batch:
            raise RequestError("session_params needs a single prompt.", param="session_params")

    @property
    def num_samples(self) -> int:
        """Number of prompts times samples."""
        return self._n * len(self._prompts)

    async def whole(self) -> Reply | list[Reply]:
        """Return the finished answer, or a list: all samples of the first prompt, then the next.

        Raises:
            RequestError: A prompt cannot be served; the others are aborted.
            CapacityError: A prompt cannot be served now; the others are aborted.
        """
        inputs, prompt_ids = await self._inputs()
        with self._service.sessions.recorded(self._turn):
            samples = await collect(self._service, inputs)
            self._record(samples[0][0].token_ids, samples[0][0].finish)
        replies = [
            self._whole_reply(j, sample, self._options(i, prompt_ids), self._counter(inputs[i]))
            for i, of_prompt in enumerate(samples)
            for j, sample in enumerate(of_prompt)
        ]
        return replies if self._is_batch or self._n > 1 else replies[0]

    async def stream(self) -> AsyncGenerator[Reply, None]:
        """Yield growing answers; those of several samples carry an `index`.

        The lists in an answer keep growing while the stream is read. An error after the first
        answer is reported in the last `finish_reason`.

        Raises:
            RequestError: See `whole`.
            CapacityError: See `whole`.
        """
        inputs, prompt_ids = await self._inputs()
        many = self._is_batch or self._n > 1
        cumulative = not self._service.text.incremental_stream
        states = [
            ReplyState(self._options(i, prompt_ids, j if many else None), cumulative)
            for j, i in enumerate(i for i in range(len(inputs)) for _ in range(self._n))
        ]
        counters = [self._counter(inp) for inp in inputs for _ in range(self._n)]
        started = False
        with self._service.sessions.recorded(self._turn):
            async with aclosing(stream(self._service, inputs)) as deltas:
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
                    yield self._reply(state, delta)

    def _record(self, ids: Sequence[int], finish: Finish | None) -> None:
        """Record the turn before the client learns that it ended and continues from it."""
        if self._turn is not None:
            self._service.sessions.extend(self._turn, ids)
            if finish is not None:
                self._service.sessions.end(self._turn, aborted=finish.type == "abort")

    async def _inputs(self) -> tuple[list[GenerateInput], Sequence[Sequence[int]] | None]:
        """Return the engine inputs, and the prompts' token IDs if the client wants them."""
        prompt_ids: list[Sequence[int]] | None = None
        wanted = bool(self._body.return_prompt_token_ids)
        if self._session is not None:
            self._turn = await self._begin_turn(self._session, self._prompts[0])
            prompt = replace(self._prompts[0], rid=self._turn.rid)
            ids = self._turn.prompt.tolist()
            return [self._input(prompt, ids)], [ids] if wanted else None
        if wanted:
            prompt_ids = [await self._ids(prompt) for prompt in self._prompts]
        return [
            self._input(p, prompt_ids[i] if prompt_ids else None)
            for i, p in enumerate(self._prompts)
        ], prompt_ids

    async def _ids(self, prompt: Prompt) -> Sequence[int]:
        if prompt.input_ids is not None:
            return prompt.input_ids
        return await self._service.manager.tokenize(prompt.text or "")

    async def _begin_turn(self, params: SessionParams, prompt: Prompt) -> Turn:
        """Start the next turn of a session; its owner ends it.

        Raises:
            RequestError: The session does not allow it.
            CapacityError: The tenant's sessions are full.
        """
        if prompt.sampling.n > 1:
            message = "sampling_params.n: a turn of a session has one sample."
            raise RequestError(message, param="sampling_params.n")
        new = NewTurn(
            rid=prompt.rid or secrets.token_hex(16),
            ids=await self._ids(prompt),
            max_new_tokens=prompt.sampling.max_new_tokens,
        )
        return self._service.sessions.begin(self._tenant, params, new)

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
            tenant=self._tenant,
            cache_salt=prompt.cache_salt,
            options=request_options(self._body),
            thinking=self._thinking(prompt),
            media=prompt.media,
        )

    def _thinking(self, prompt: Prompt) -> ThinkingOptions | None:
        parsers, budget = self._service.parsers, self._body.max_thinking_tokens
        inside, opens = bool(self._body.require_reasoning), False
        if parsers.reasoning is None or (budget is None and not inside):
            return None
        if not inside:
            tokenizer = self._service.manager.tokenizer
            text = prompt.text or ending(tokenizer, prompt.input_ids or ())
            inside = parsers.reasoning.starts_in_reasoning(text)
            opens = parsers.reasoning.may_start_reasoning(text)
        grammar = (
            GrammarWithThinking(may_open=opens) if prompt.sampling.grammar is not None else None
        )
        return thinking_of(parsers, inside=inside, budget=budget, grammar=grammar)

    def _options(
        self, i: int, prompt_ids: Sequence[Sequence[int]] | None, index: int | None = None
    ) -> ReplyOptions:
        logprobs = self._prompts[i].logprobs
        with_text = bool(self._body.return_text_in_logprobs) and logprobs is not None
        return ReplyOptions(
            logprobs=logprobs is not None,
            top=logprobs is not None and logprobs.top > 0,
            wanted_ids=logprobs.token_ids if logprobs is not None else (),
            text_of=self._service.manager.tokenizer.token_text if with_text else None,
            prompt_ids=prompt_ids[i] if prompt_ids else None,
            index=index,
            weight_version=self._service.manager.router.weight_version,
        )

    def _counter(self, inp: GenerateInput) -> ReasoningCounter:
        """Return a counter of a sample's reasoning, which its prompt may have started."""
        marks, tokenizer = self._service.parsers.marks, self._service.manager.tokenizer
        inside = bool(self._body.require_reasoning)
        if marks is not None and not inside:
            inside = marks.is_open(inp.text, inp.input_ids or (), tokenizer)
        return ReasoningCounter(marks, inside=inside)

    def _whole_reply(
        self, index: int, sample: Sample, options: ReplyOptions, counter: ReasoningCounter
    ) -> Reply:
        counter.add(sample.token_ids)
        state = ReplyState(options, reasoning_tokens=counter.count)
        state.add(sample.text, sample.token_ids, None, sample.prompt_logprobs)
        for part in sample.logprobs:
            state.add("", (), part, None)
        return self._reply(state, sample.last_delta(index))

    def _reply(self, state: ReplyState, delta: SampleDelta) -> Reply:
        timing: dict[str, float] = {}
        if delta.finish is not None:
            service, tokens = self._service, delta.usage.completion_tokens
            elapsed_s = service.clock() - self._began_s
            timing = timing_keys(delta.timing, elapsed_s, service.wall(), tokens)
        state.weight_versions = delta.weight_versions
        return state.reply(delta.rid, delta.usage, delta.finish, timing)


def _check_thinking(
    service: GenerationService, body: GenerateBody, prompts: Sequence[Prompt]
) -> None:
    """Reject options that need thinking markers, if the model has none."""
    if service.parsers.reasoning is not None:
        return
    constrained = any(prompt.sampling.grammar is not None for prompt in prompts)
    for field, matters in (
        ("max_thinking_tokens", body.max_thinking_tokens is not None),
        ("require_reasoning", bool(body.require_reasoning) and constrained),
    ):
        if matters:
            message = f"{field}: this server knows no format of thinking (--reasoning-parser)."
            raise RequestError(message, param=field)

"""`/v1/audio/transcriptions` and `/v1/audio/translations`."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np
from starlette.responses import Response

from sylvan.api.media import SOURCE
from sylvan.api.multipart import parse_form
from sylvan.api.openai.audio import (
    AudioForm,
    Segment,
    SpokenWord,
    audio_form,
    audio_reply,
    whole_text,
)
from sylvan.media.source import MediaSource
from sylvan.protocol.errors import RequestError
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.server.context import Context
from sylvan.runtime.server.endpoint import Call, json_response
from sylvan.runtime.server.openai.completions import openai_error_event
from sylvan.runtime.server.sse import event
from sylvan.runtime.server.streaming import EventStream, await_first_chunk, cancel_on_disconnect
from sylvan.runtime.serving.conversation import Conversation, RequestFacts, prepare
from sylvan.runtime.serving.samples import Sample, collect
from sylvan.runtime.serving.service import read_generation_config
from sylvan.runtime.tokenizer.types import GenerateInput, ServedModelInfo, error_of
from sylvan.text.whisper import TIME_STEP_S, WINDOW_S, WhisperTokens
from sylvan.text.word_times import split_words, timed_words, token_starts
from sylvan.utils.threads import call_in_thread

_INSTRUCTIONS = {
    "transcribe": "Transcribe what is said, word for word. Answer with the text only.",
    "translate": "Translate what is said to English. Answer with the translation only.",
}


async def transcriptions(call: Call[None]) -> Response:
    """Transcribe speech."""
    return await _answer(call, "transcribe")


async def translations(call: Call[None]) -> Response:
    """Translate speech into English text."""
    return await _answer(call, "translate")


async def _answer(call: Call[None], task: str) -> Response:
    request, context = call.request, call.context
    body = await context.bodies.read(request)
    given = request.headers.get("content-type", "")
    form = await context.bodies.decoded(body, lambda body: audio_form(parse_form(given, body)))
    media = context.engine.media
    if media is None or "audio" not in context.engine.facts.media_tokens:
        raise RequestError("file: this model does not accept audio.", param="file")
    samples, rate = await media.samples(MediaSource("audio", "file", form.file))
    job = _Whisper(call, form, task) if _is_whisper(context) else _Chat(call, form, task)
    if form.stream:
        events = _events(job, samples, rate)
        return EventStream(await await_first_chunk(request, events, openai_error_event))
    segments = await cancel_on_disconnect(request, _all(job, samples, rate))
    seconds = len(samples) / rate
    reply, kind = audio_reply(form, task, job.language, seconds, segments)
    if isinstance(reply, str):
        return Response(reply, media_type=kind)
    return json_response(reply)


async def _all(job: _AudioCall, samples: np.ndarray, rate: int) -> list[Segment]:
    async with aclosing(job.windows(samples, rate)) as windows:
        return [segment async for some in windows for segment in some]


async def _events(job: _AudioCall, samples: np.ndarray, rate: int) -> AsyncGenerator[bytes, None]:
    every: list[Segment] = []
    async with aclosing(job.windows(samples, rate)) as windows:
        async for segments in windows:
            before = whole_text(every)
            every += segments
            delta = whole_text(every)[len(before) :]
            if delta:
                yield event({"type": "transcript.text.delta", "delta": delta})
    seconds = max(1, round(len(samples) / rate))
    usage = {"type": "duration", "seconds": seconds}
    yield event({"type": "transcript.text.done", "text": whole_text(every), "usage": usage})


class _AudioCall:
    """One audio input, processed window by window."""

    def __init__(self, call: Call[None], form: AudioForm, task: str) -> None:
        self._call, self._form, self._task = call, form, task
        self._context = call.context
        self.language = form.language

    async def windows(
        self, samples: np.ndarray, rate: int
    ) -> AsyncGenerator[Sequence[Segment], None]:
        """Yield the segments of each window, with absolute times."""
        at = 0
        while at < len(samples):
            window = samples[at : at + int(WINDOW_S * rate)]
            if at and len(window) < rate // 10:
                return  # too short to contain speech
            last = at + len(window) >= len(samples)
            segments, seconds = await self._window(window, len(window) / rate, last=last)
            yield [segment.later(at / rate) for segment in segments]
            at += len(window) if last else max(rate, int(seconds * rate))

    async def _window(
        self, window: np.ndarray, seconds: float, *, last: bool
    ) -> tuple[Sequence[Segment], float]:
        """Return the segments of a window, and the seconds after which the next one starts."""
        raise NotImplementedError

    def _source(self, window: np.ndarray) -> MediaSource:
        data = np.ascontiguousarray(window, np.float32).tobytes()
        return MediaSource("audio", "file", data, options={"raw": True})


class _Whisper(_AudioCall):
    """Transcribes with a speech model (Whisper)."""

    def __init__(self, call: Call[None], form: AudioForm, task: str) -> None:
        super().__init__(call, form, task)
        engine = self._context.engine
        try:
            self._tokens = WhisperTokens(engine.tokenizer, engine.facts.context_len)
        except KeyError as error:
            message = f"the tokenizer of this model has no token {error.args[0]!r}."
            raise RequestError(message) from error
        if form.words and (why := no_word_times(engine.facts)):
            raise RequestError(why, param="timestamp_granularities")
        known = self._tokens.languages
        if form.language and known and form.language not in known:
            message = f"language: {form.language[:40]!r} is not known to this model."
            raise RequestError(message, param="language")
        if task == "translate" and not known:
            raise RequestError("this model knows a single language and cannot translate.")
        before = engine.tokenizer.encode_user(f" {form.prompt}", add_special_tokens=False)
        self._before: list[int] = before if form.prompt else []
        said = read_generation_config(engine.facts.model_path)
        silent = said.get("suppress_tokens") or ()
        self._bias = {str(token): -100.0 for token in silent if token >= 0}

    async def _window(
        self, window: np.ndarray, seconds: float, *, last: bool
    ) -> tuple[Sequence[Segment], float]:
        if not self.language and self._tokens.languages:
            self.language = await self._found_language(window)
        times = self._form.segments or self._form.words or not last
        prompt = self._tokens.prompt(self.language, self._task, self._before, times=times)
        room = self._context.engine.facts.context_len - len(prompt)
        sample = await self._write(window, prompt, room, self._bias)
        eos = self._context.engine.tokenizer.eos_ids
        ids = [token for token in sample.token_ids if token not in eos]
        spoken, then = self._tokens.spoken(ids, seconds)
        segments = [
            Segment(s.start, s.end, await self._context.engine.detokenize(s.ids), s.ids)
            for s in spoken
        ]
        self._before += [token for part in spoken for token in part.ids]
        if self._form.words:
            segments = await self._with_words(window, seconds, segments)
        return segments, then

    async def _with_words(
        self, window: np.ndarray, seconds: float, segments: Sequence[Segment]
    ) -> list[Segment]:
        """Return the segments of a window with their words.

        The model reads all of its text again, without times, and says what each token attends to.
        """
        engine = self._context.engine
        prompt = self._tokens.prompt(self.language, self._task, (), times=False)
        room = engine.facts.context_len - len(prompt) - 2  # the end, and a token to generate
        ids = [token for segment in segments for token in segment.tokens][:room]
        if not ids:
            return list(segments)
        end = engine.tokenizer.eos_ids[0]
        weights = await self._weights(window, (*prompt, *ids, end), seconds)
        rows = weights[len(prompt) - 1 : len(prompt) + len(ids)]
        starts = await call_in_thread(token_starts, rows)
        found: list[Segment] = []
        at = 0
        for segment in segments:
            words = split_words(segment.tokens, engine.tokenizer.token_bytes, self.language)
            timed = timed_words(words, starts[min(at, len(starts) - 1) :], seconds)
            at += len(segment.tokens)
            spoken = [SpokenWord(word.start, word.end, word.text) for word in timed]
            found.append(dataclasses.replace(segment, words=spoken))
        return found

    async def _weights(
        self, window: np.ndarray, prompt: Sequence[int], seconds: float
    ) -> np.ndarray:
        """Return what the tokens of a prompt attend to: (tokens, vectors of the window)."""
        given = GenerateInput(
            input_ids=prompt,
            sampling=SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True),
            stream=False,
            tenant=self._call.tenant.name,
            media=(self._source(window),),
            align=max(1, round(seconds / TIME_STEP_S)),
        )
        found: np.ndarray | None = None
        async with aclosing(self._context.engine.generate(given)) as deltas:
            async for delta in deltas:
                if (error := error_of(delta.finish)) is not None:
                    raise error
                found = delta.embedding if found is None else found
        if found is None:
            raise RequestError("the request was aborted")
        return found

    async def _found_language(self, window: np.ndarray) -> str:
        """Return the most likely language."""
        bias = {str(token): 100.0 for token in self._tokens.languages.values()}
        sample = await self._write(window, (self._tokens.start,), 1, bias)
        [token] = sample.token_ids
        names = {number: name for name, number in self._tokens.languages.items()}
        return names.get(token, "en")

    async def _write(
        self, window: np.ndarray, prompt: Sequence[int], limit: int, bias: dict[str, float]
    ) -> Sample:
        sampling = SamplingParams(
            max_new_tokens=limit,
            temperature=self._form.temperature if limit > 1 else 0.0,
            logit_bias=bias,
        )
        given = GenerateInput(
            input_ids=prompt,
            sampling=sampling,
            stream=False,
            tenant=self._call.tenant.name,
            media=(self._source(window),),
        )
        [[sample]] = await collect(self._context.service, [given])
        return sample


class _Chat(_AudioCall):
    """Transcribes with a chat model that accepts audio."""

    def __init__(self, call: Call[None], form: AudioForm, task: str) -> None:
        super().__init__(call, form, task)
        if form.words:
            name = "timestamp_granularities"
            message = f"{name}: this model reports no word times; Whisper does."
            raise RequestError(message, param=name)

    async def _window(
        self, window: np.ndarray, seconds: float, *, last: bool
    ) -> tuple[Sequence[Segment], float]:
        request = _INSTRUCTIONS[self._task]
        if self.language and self._task == "transcribe":
            request += f" The language is {self.language}."
        if self._form.prompt:
            request += f" Context: {self._form.prompt}"
        parts: list[dict[str, Any]] = [
            {"type": "audio", SOURCE: self._source(window)},
            {"type": "text", "text": request},
        ]
        conversation = Conversation(
            messages=[{"role": "user", "content": parts}],
            sampling=SamplingParams(max_new_tokens=None, temperature=self._form.temperature),
            request=RequestFacts(
                rid=self._context.ids(16), stream=False, tenant=self._call.tenant.name
            ),
        )
        made = await prepare(self._context.service, conversation)
        [[sample]] = await collect(self._context.service, [made.input])
        text = sample.text.strip() + " "
        return [Segment(0.0, seconds, text, tuple(sample.token_ids))], seconds


def no_word_times(facts: ServedModelInfo) -> str:
    """Return why a model does not report word times; empty if it does."""
    if facts.extra.get("word_times", True):
        return ""
    return "timestamp_granularities: word times are not computed on this device; device=cpu does."


def _is_whisper(context: Context) -> bool:
    return context.engine.facts.architecture == "WhisperForConditionalGeneration"

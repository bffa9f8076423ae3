"""Forms and answers of `/v1/audio/transcriptions` and `/v1/audio/translations`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic import BaseModel

from sylvan.protocol.errors import RequestError

FORMATS = ("json", "text", "srt", "verbose_json", "vtt")
MAX_PROMPT_CHARS = 1 << 14


class FormPart(Protocol):
    """One field of a form."""

    @property
    def content(self) -> bytes:
        """Its bytes."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class AudioForm:
    """A parsed transcription request.

    Attributes:
        file: The audio file.
        language: Language as in ISO 639-1; empty: detect it.
        prompt: Text that may precede the audio.
        format: Format of the answer.
        temperature: Sampling temperature.
        stream: Stream the text.
        segments: Return segment times.
        words: Return word times.
    """

    file: bytes
    language: str = ""
    prompt: str = ""
    format: str = "json"
    temperature: float = 0.0
    stream: bool = False
    segments: bool = False
    words: bool = False


class TranscriptionReply(BaseModel):
    """A transcription; the last five fields only in `verbose_json`. Other formats are text."""

    text: str
    usage: dict[str, Any]
    task: str | None = None
    language: str | None = None
    duration: float | None = None
    segments: list[dict[str, Any]] | None = None
    words: list[dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class SpokenWord:
    """A word, with times in seconds from the beginning."""

    start: float
    end: float
    text: str


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment of speech, with times in seconds from the beginning, and its words if asked for."""

    start: float
    end: float
    text: str
    tokens: Sequence[int] = field(default=())
    words: Sequence[SpokenWord] = field(default=())

    def later(self, by: float) -> Segment:
        """The segment `by` seconds later."""
        words = [SpokenWord(by + w.start, by + w.end, w.text) for w in self.words]
        return Segment(by + self.start, by + self.end, self.text, self.tokens, words)


def audio_form(parts: Mapping[str, FormPart]) -> AudioForm:
    """Parse a form.

    Raises:
        RequestError: A field is missing or invalid; the message names it.
    """
    if "file" not in parts:
        raise RequestError("file must be given.", param="file")
    form = _text(parts, "response_format") or "json"
    if form not in FORMATS:
        known = ", ".join(FORMATS)
        raise RequestError(
            f"response_format must be one of {known}, not {form[:40]!r}.", param="response_format"
        )
    stream = _text(parts, "stream").lower() in ("true", "1")
    if stream and form not in ("json", "text"):
        message = f"stream: response_format {form} cannot be streamed."
        raise RequestError(message, param="stream")
    times = _granularities(parts, form)
    prompt = _text(parts, "prompt")
    if len(prompt) > MAX_PROMPT_CHARS:
        message = f"prompt must have at most {MAX_PROMPT_CHARS} characters."
        raise RequestError(message, param="prompt")
    return AudioForm(
        file=parts["file"].content,
        language=_text(parts, "language").lower(),
        prompt=prompt,
        format=form,
        temperature=_temperature(_text(parts, "temperature")),
        stream=stream,
        segments=form in ("srt", "vtt") or (form == "verbose_json" and "segment" in times),
        words="word" in times,
    )


def _granularities(parts: Mapping[str, FormPart], form: str) -> frozenset[str]:
    """Units with times; segments by default."""
    given = [_text(parts, f"timestamp_granularities{end}") for end in ("[]", "")]
    found = frozenset(name.strip() for text in given if text for name in text.split(","))
    unknown = found - {"segment", "word"}
    message = ""
    if unknown:
        message = f"each is 'segment' or 'word', not {min(unknown)[:40]!r}."
    elif found and form != "verbose_json":
        message = f"response_format {form} contains no times; use verbose_json."
    if message:
        name = "timestamp_granularities"
        raise RequestError(f"{name}: {message}", param=name)
    return found or frozenset({"segment"})


def audio_reply(
    form: AudioForm, task: str, language: str, seconds: float, segments: Sequence[Segment]
) -> tuple[dict[str, Any] | str, str]:
    """An answer, and its media type."""
    text = whole_text(segments)
    if form.format == "text":
        return f"{text}\n", "text/plain; charset=utf-8"
    if form.format == "srt":
        lines = (
            f"{n}\n{_clock(s.start, ',')} --> {_clock(s.end, ',')}\n{s.text.strip()}\n"
            for n, s in enumerate(segments, 1)
        )
        return "\n".join(lines), "text/plain; charset=utf-8"
    if form.format == "vtt":
        lines = (
            f"{_clock(s.start, '.')} --> {_clock(s.end, '.')}\n{s.text.strip()}\n" for s in segments
        )
        return "\n".join(("WEBVTT\n", *lines)), "text/vtt; charset=utf-8"
    usage = {"type": "duration", "seconds": max(1, round(seconds))}
    if form.format == "json":
        return {"text": text, "usage": usage}, "application/json"
    return {
        "task": task,
        "language": language,
        "duration": round(seconds, 3),
        "text": text,
        **({"segments": _segments(form, segments)} if form.segments else {}),
        **({"words": _words(segments)} if form.words else {}),
        "usage": usage,
    }, "application/json"


def _segments(form: AudioForm, segments: Sequence[Segment]) -> list[dict[str, Any]]:
    return [
        {
            "id": n,
            "start": round(s.start, 2),
            "end": round(s.end, 2),
            "text": s.text,
            "tokens": list(s.tokens),
            "temperature": form.temperature,
        }
        for n, s in enumerate(segments)
    ]


def _words(segments: Sequence[Segment]) -> list[dict[str, Any]]:
    return [
        {"word": word.text.strip(), "start": round(word.start, 2), "end": round(word.end, 2)}
        for segment in segments
        for word in segment.words
    ]


def whole_text(segments: Sequence[Segment]) -> str:
    """Join the text of all segments."""
    return "".join(segment.text for segment in segments).strip()


def _text(parts: Mapping[str, FormPart], name: str) -> str:
    part = parts.get(name)
    if part is None:
        return ""
    try:
        return part.content.decode().strip()
    except UnicodeDecodeError as error:
        raise RequestError(f"{name} must be UTF-8.", param=name) from error


def _temperature(text: str) -> float:
    try:
        value = float(text or 0)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise RequestError("temperature must be a number from 0 to 1.", param="temperature")
    return value


def _clock(seconds: float, point: str) -> str:
    whole, thousandths = divmod(round(seconds * 1000), 1000)
    minutes, second = divmod(whole, 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour:02}:{minute:02}:{second:02}{point}{thousandths:03}"

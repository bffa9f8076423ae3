"""Whisper's control tokens: task and language in the prompt, times in the output.

Source: arXiv:2212.04356, section 2.3, and OpenAI's published code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

WINDOW_S = 30.0
"""Length of the audio that the model processes at once."""

TIME_STEP_S = 0.02
_MAX_BEFORE = 223  # tokens of preceding text, at most half of the context
_LANGUAGES = (
    "en zh de es ru ko fr ja pt tr pl ca nl ar sv it id hi fi vi he uk el ms cs ro da hu ta no th "
    "ur hr bg lt la mi ml cy sk te fa lv bn sr az sl kn et mk br eu is hy ne mn bs kk sq sw gl mr "
    "pa si km sn yo so af oc ka be tg sd gu am yi lo uz fo ht ps tk nn mt sa lb my bo tl mg as tt "
    "haw ln ha ba jw su yue"
)


class WhisperVocabulary(Protocol):
    """The part of a tokenizer that is needed."""

    def token_id(self, name: str) -> int | None:
        """The id of a token."""
        ...


@dataclass(frozen=True, slots=True)
class Spoken:
    """A segment of a window: ids of its text, start and end in seconds."""

    start: float
    end: float
    ids: tuple[int, ...]


class WhisperTokens:
    """Control tokens of one checkpoint.

    Args:
        vocabulary: The checkpoint's vocabulary.
        context_len: Maximum tokens of prompt and text.

    Raises:
        KeyError: the vocabulary is not Whisper's; names the missing token.
    """

    def __init__(self, vocabulary: WhisperVocabulary, context_len: int = 448) -> None:
        self._vocabulary = vocabulary
        self._max_before = min(_MAX_BEFORE, context_len // 2 - 1)
        self.start = self._id("<|startoftranscript|>")
        self._tasks = {task: self._id(f"<|{task}|>") for task in ("transcribe", "translate")}
        self._before = vocabulary.token_id("<|startofprev|>")
        self._no_times = self._id("<|notimestamps|>")
        self._first_time = self._no_times + 1
        found = {name: vocabulary.token_id(f"<|{name}|>") for name in _LANGUAGES.split()}
        self.languages = {name: token for name, token in found.items() if token is not None}

    def prompt(
        self, language: str, task: str, before: Sequence[int], *, times: bool
    ) -> tuple[int, ...]:
        """The prompt for a text.

        Args:
            language: Spoken language; models of one language have none.
            task: `transcribe`, or `translate` to English.
            before: Preceding text; its end is used.
            times: Whether to write times.
        """
        parts: list[int] = []
        if before and self._before is not None:
            parts += [self._before, *before[-self._max_before :]]
        parts.append(self.start)
        if self.languages:
            parts += [self.languages[language], self._tasks[task]]
        if not times:
            parts.append(self._no_times)
        return tuple(parts)

    def spoken(self, ids: Sequence[int], seconds: float) -> tuple[list[Spoken], float]:
        """Segments of a window of `seconds`, and the start of the next window.

        A segment that the window cuts off is left to the next one.
        """
        found: list[Spoken] = []
        text: list[int] = []
        start, last = 0.0, 0.0
        for token in ids:
            if token < self._first_time:
                text.append(token)
                continue
            time = min((token - self._first_time) * TIME_STEP_S, seconds)
            if text:
                found.append(Spoken(start, max(start, time), tuple(text)))
                text, last = [], time
            start = time
        if text and last < 1.0:  # nothing but this segment
            found.append(Spoken(start, seconds, tuple(text)))
            text = []
        return found, last if text else seconds

    def _id(self, name: str) -> int:
        found = self._vocabulary.token_id(name)
        if found is None:
            raise KeyError(name)
        return found

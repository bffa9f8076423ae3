"""Words of a transcription and their times, by dynamic time warping of attention weights.

As in OpenAI's published code of Whisper (`whisper/timing.py`, `whisper/tokenizer.py`).
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sylvan.text.whisper import TIME_STEP_S

_WITHOUT_SPACES = frozenset({"ja", "lo", "my", "th", "yue", "zh"})
_BEFORE = "\"'\u201c\u00a1\u00bf([{-"
_AFTER = "\"'.\u3002,\uff0c!\uff01?\uff1f:\uff1a\u201d)]}\u3001"


@dataclass(frozen=True, slots=True)
class Word:
    """A word, with its token ids, and its start and end in seconds."""

    text: str
    ids: tuple[int, ...]
    start: float = 0.0
    end: float = 0.0


def token_starts(weights: np.ndarray) -> np.ndarray:
    """Return when each token is spoken, in seconds from the start of the audio.

    Args:
        weights: Attention weights of the rows that predict the tokens, and of the row after,
            float32 (N + 1, vectors).

    Returns: float64 (N + 1,): the start of each token, and the end of the last one.
    """
    tokens, vectors = time_warp(-weights.astype(np.float64))
    firsts = np.flatnonzero(np.diff(tokens, prepend=-1))
    return vectors[firsts] * TIME_STEP_S


def time_warp(cost: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the cheapest path through a matrix (N, M), from its first corner to the last.

    A step goes down, to the right, or both. Diagonals of the matrix are computed at once.

    Returns: Rows and columns of the path.
    """
    rows, columns = cost.shape
    total = np.full((rows + 1, columns + 1), np.inf, np.float32)
    total[0, 0] = 0
    steps = np.full((rows + 1, columns + 1), 2, np.int8)
    steps[:, 0] = 1
    for diagonal in range(2, rows + columns + 1):
        i = np.arange(max(1, diagonal - columns), min(rows, diagonal - 1) + 1)
        j = diagonal - i
        both, down, right = total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]
        chosen = np.where((down < both) & (down < right), 1, 2)
        chosen = np.where((both < down) & (both < right), 0, chosen)
        total[i, j] = cost[i - 1, j - 1] + np.choose(chosen, (both, down, right))
        steps[i, j] = chosen
    steps[0, :] = 2
    path: list[tuple[int, int]] = []
    i, j = rows, columns
    while i > 0 or j > 0:
        path.append((i - 1, j - 1))
        step = steps[i, j]
        i, j = i - int(step != 2), j - int(step != 1)
    found = np.array(path[::-1])
    return found[:, 0], found[:, 1]


def split_words(ids: Sequence[int], bytes_of: Callable[[int], bytes], language: str) -> list[Word]:
    """Return the words of a text, punctuation with the word that it belongs to.

    Args:
        ids: Its tokens.
        bytes_of: The bytes of a token.
        language: Its language as in ISO 639-1; some are written without spaces.
    """
    words: list[Word] = []
    for piece in _characters(ids, bytes_of):
        mark = piece.text.strip() in string.punctuation
        begins = language in _WITHOUT_SPACES or piece.text.startswith(" ") or mark
        if begins or not words:
            words.append(piece)
        else:
            words[-1] = _joined(words[-1], piece)
    return _with_punctuation(words)


def timed_words(words: Sequence[Word], starts: np.ndarray, most: float) -> list[Word]:
    """Return the words with times.

    Args:
        words: Words.
        starts: See `token_starts`.
        most: Length of the sound in seconds; no word ends later.
    """
    found: list[Word] = []
    at = 0
    for word in words:
        first, last = (min(place, len(starts) - 1) for place in (at, at + len(word.ids)))
        start, end = (min(float(starts[place]), most) for place in (first, last))
        found.append(Word(word.text, word.ids, start, end))
        at += len(word.ids)
    return found


def _characters(ids: Sequence[int], bytes_of: Callable[[int], bytes]) -> list[Word]:
    """Split tokens where they are whole characters."""
    found: list[Word] = []
    data, held = b"", list[int]()
    for number, token in enumerate(ids):
        data += bytes_of(token)
        held.append(token)
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            if number + 1 < len(ids):
                continue
            text = data.decode("utf-8", "replace")
        found.append(Word(text, tuple(held)))
        data, held = b"", []
    return found


def _with_punctuation(words: list[Word]) -> list[Word]:
    """Join opening marks to the word after them, closing ones to the word before."""
    opened: list[Word] = []
    for word in reversed(words):
        if opened and word.text.startswith(" ") and word.text.strip() in _BEFORE:
            opened[-1] = _joined(word, opened[-1])
        else:
            opened.append(word)
    found: list[Word] = []
    for word in reversed(opened):
        if found and not found[-1].text.endswith(" ") and word.text in _AFTER:
            found[-1] = _joined(found[-1], word)
        else:
            found.append(word)
    return found


def _joined(one: Word, other: Word) -> Word:
    return Word(one.text + other.text, one.ids + other.ids)

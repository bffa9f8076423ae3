"""Whisper's prompt, and the meaning of its timestamps."""

from __future__ import annotations

import pytest

from sylvan.text.whisper import Spoken, WhisperTokens

NAMES = [
    *("<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>"),
    *("<|startofprev|>", "<|notimestamps|>"),
]
FIRST_TIME = 100 + len(NAMES)


class Words:
    def __init__(self, names) -> None:
        self._ids = {name: 100 + place for place, name in enumerate(names)}

    def token_id(self, name: str) -> int | None:
        return self._ids.get(name)


def time(seconds: float) -> int:
    return FIRST_TIME + round(seconds / 0.02)


def test_prompts_name_language_and_task():
    tokens = WhisperTokens(Words(NAMES))
    assert tokens.prompt("de", "translate", (), times=False) == (100, 102, 103, 106)
    assert tokens.prompt("en", "transcribe", (7, 8), times=True) == (105, 7, 8, 100, 101, 104)
    long = tokens.prompt("en", "transcribe", range(50), times=True)
    assert long[1:-3] == tuple(range(50))
    short = WhisperTokens(Words(NAMES), 20).prompt("en", "transcribe", range(50), times=True)
    assert short[1:-3] == tuple(range(41, 50))


def test_models_of_one_language_get_neither():
    tokens = WhisperTokens(Words([n for n in NAMES if n not in ("<|en|>", "<|de|>")]))
    assert tokens.prompt("", "transcribe", (), times=True) == (100,)


def test_other_vocabularies_are_refused():
    with pytest.raises(KeyError, match="startoftranscript"):
        WhisperTokens(Words(["a"]))


@pytest.mark.parametrize(
    ("ids", "spoken", "then"),
    [
        ([7, 8], [Spoken(0.0, 30.0, (7, 8))], 30.0),
        ([], [], 30.0),
        (
            [time(1), 7, time(3), time(4), 8, time(6)],
            [Spoken(1.0, 3.0, (7,)), Spoken(4.0, 6.0, (8,))],
            30.0,
        ),
        ([time(1), 7, time(3), time(3), 8, 9], [Spoken(1.0, 3.0, (7,))], 3.0),  # cut off
        ([time(0), 7, 8], [Spoken(0.0, 30.0, (7, 8))], 30.0),
        ([time(5), 7, time(40)], [Spoken(5.0, 30.0, (7,))], 30.0),
    ],
)
def test_times_divide_a_window(ids, spoken, then):
    found, end = WhisperTokens(Words(NAMES)).spoken(ids, 30.0)
    assert [(round(s.start, 6), round(s.end, 6), s.ids) for s in found] == [
        (s.start, s.end, s.ids) for s in spoken
    ]
    assert end == pytest.approx(then)

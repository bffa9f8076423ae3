"""How answers of each API become times and counts."""

from __future__ import annotations

import pytest

from sylvan.bench.apis import APIS
from sylvan.bench.outcome import RequestRecord, TokenTimer
from sylvan.config.bench import AnswerConfig


def read(name, events):
    reception = TokenTimer(RequestRecord(4), sent_s=0.0)
    api = APIS[name](AnswerConfig())
    for now_s, event in enumerate(events, 1):
        api.read(event, reception, float(now_s))
    reception.end(len(events) + 1.0)
    return reception.outcome


def native(text, count):
    return {"text": text, "meta_info": {"completion_tokens": count, "prompt_tokens": 4}}


def test_tokens_without_text_count():
    found = read("native", [native("", 1), native("", 2), native("ab", 4)])

    assert (found.output_tokens, found.text) == (4, "ab")
    assert found.ttft_s == 1.0
    assert found.gaps_s == [1.0, 0.5, 0.5]


def test_events_without_new_tokens_change_no_times():
    found = read("native", [native("a", 1), native("a", 1), native("ab", 2)])

    assert (found.ttft_s, found.gaps_s, found.latency_s) == (1.0, [2.0], 4.0)


@pytest.mark.parametrize(
    ("name", "piece"),
    [
        ("completions", lambda text: {"text": text}),
        ("chat", lambda text: {"delta": {"content": text}}),
    ],
)
def test_pieces_of_text_are_tokens_until_the_server_counts(name, piece):
    texts = ("a", "", "b")
    usage = {"prompt_tokens": 9, "completion_tokens": 3}
    events = [{"choices": [piece(text)]} for text in texts]

    found = read(name, [*events, {"choices": [], "usage": usage}])

    assert (found.ttft_s, found.gaps_s) == (1.0, [2.0])
    assert (found.prompt_tokens, found.output_tokens, found.text) == (9, 3, "ab")

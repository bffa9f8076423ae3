from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sylvan.protocol.messages import (
    Finish,
    FlushText,
    StartDetokenizing,
    StopFound,
    TextOutput,
    TokenBatch,
    TokenLogprobs,
    TokenOutput,
    Usage,
)
from sylvan.protocol.names import internal_name
from sylvan.runtime.tokenizer.detokenizer import DetokenizerManager


@dataclass
class Letters:
    """Token i is character i; 0 is special, and tokens above 255 are bytes of larger characters."""

    special_ids: frozenset[int] = frozenset({0})
    strips_first_space: bool = False
    more: dict[int, bytes] = field(default_factory=lambda: {300: b"\xe4\xbd", 301: b"\xa0"})

    def token_bytes(self, token_id: int, /) -> bytes:
        known = {0: b"<eos>", **self.more}
        return known[token_id] if token_id in known else bytes([token_id])


def ids(text: str) -> tuple[int, ...]:
    return tuple(text.encode("ascii"))


def opened(rid: str = "r.0#1.1", **options: object) -> DetokenizerManager:
    manager = DetokenizerManager(Letters())
    manager.handle(StartDetokenizing(rid=rid, prompt_tail_ids=(), **options))  # type: ignore[arg-type]
    return manager


def output(
    tokens: Sequence[int], finish: Finish | None = None, rid: str = "r.0#1.1"
) -> TokenOutput:
    values = np.array(tokens, np.float32)
    logprobs = TokenLogprobs(
        token_ids=np.array(tokens, np.int32),
        logprobs=values,
        top_ids=np.tile(np.array(tokens, np.int32)[:, None], 2),
        top_logprobs=np.tile(values[:, None], 2),
        chosen_logprobs=values[:, None],
    )
    usage = Usage(prompt_tokens=3, completion_tokens=len(tokens))
    return TokenOutput(
        rid=rid, token_ids=tuple(tokens), usage=usage, logprobs=logprobs, finish=finish
    )


def push(
    manager: DetokenizerManager, outputs: Iterable[TokenOutput]
) -> tuple[list[TextOutput], list[StopFound]]:
    texts: list[TextOutput] = []
    stops: list[StopFound] = []
    for out in outputs:
        answer = manager.handle(TokenBatch(outputs=(out,)))
        texts += answer.texts.outputs if answer.texts else ()
        stops += answer.stops
    return texts, stops


LENGTH = Finish(type="length", length=9)


def test_text_and_tokens_are_passed_on() -> None:
    manager = opened()

    texts, stops = push(manager, [output(ids("ab")), output(ids("c"), LENGTH)])

    assert [t.text for t in texts] == ["ab", "c"]
    assert texts[-1].output.finish == LENGTH
    assert not stops
    assert manager.num_live == 0


def test_half_characters_wait_for_the_rest() -> None:
    texts, _ = push(opened(), [output([300]), output([301], LENGTH)])

    assert [t.text for t in texts] == ["", "\u4f60"]


def test_tokens_after_a_stop_are_cut_from_everything() -> None:
    manager = opened(stop=("STOP",))
    tokens = ids("aaSTOPbbb")

    texts, stops = push(manager, [output(tokens[:3]), output(tokens[3:])])

    assert "".join(t.text for t in texts) == "aa"
    last = texts[-1].output
    assert last.token_ids == ids("TOP")
    assert last.finish == Finish(type="stop", matched="STOP")
    assert last.usage.completion_tokens == 6
    assert last.logprobs is not None
    for array in (
        last.logprobs.token_ids,
        last.logprobs.logprobs,
        last.logprobs.top_ids,
        last.logprobs.top_logprobs,
        last.logprobs.chosen_logprobs,
    ):
        assert array is not None
        assert len(array) == 3
    assert stops == [StopFound(rid="r.0#1.1", num_tokens=6, matched="STOP")]
    assert manager.num_live == 0


def test_what_comes_after_the_end_is_ignored() -> None:
    manager = opened(stop=("x",))
    push(manager, [output(ids("x"))])

    texts, stops = push(manager, [output(ids("more")), output(ids("!"), LENGTH)])

    assert not texts
    assert not stops


def test_a_stop_in_the_last_tokens_wins_over_length() -> None:
    texts, stops = push(opened(stop=("b",)), [output(ids("abc"), LENGTH)])

    assert texts[0].output.finish == Finish(type="stop", matched="b")
    assert texts[0].output.token_ids == ids("ab")
    assert stops == [StopFound(rid="r.0#1.1", num_tokens=2, matched="b")]


def test_the_end_of_a_text_with_stops_is_confirmed() -> None:
    texts, stops = push(opened(stop=("zz",)), [output(ids("az"), LENGTH)])

    assert texts[0].text == "az"  # what might have become a stop is let go
    assert stops == [StopFound(rid="r.0#1.1", num_tokens=2, matched=None)]


@pytest.mark.parametrize("pattern", ["(", "a{9999}"])
def test_an_unusable_pattern_fails_its_request_only(pattern: str) -> None:
    manager = opened(stop_regex=(pattern,))
    manager.handle(StartDetokenizing(rid="s.0#1.1", prompt_tail_ids=()))

    texts, stops = push(
        manager,
        [output(ids("a" * 60 + "!")), output(ids("!")), output(ids("ok"), rid="s.0#1.1")],
    )

    failed = texts[0].output
    assert failed.finish is not None
    assert (failed.finish.type, failed.finish.status) == ("abort", 400)
    assert failed.finish.param == "stop_regex"
    assert failed.token_ids == ()
    assert stops == [StopFound(rid="r.0#1.1", num_tokens=0, matched="")]
    assert [t.text for t in texts[1:]] == ["ok"]


@pytest.mark.parametrize("no_stop_trim", [False, True])
def test_a_matched_stop_token_is_kept_in_ids_and_dropped_from_text(no_stop_trim: bool) -> None:
    finish = Finish(type="stop", matched=ord("b"))

    texts, _ = push(opened(no_stop_trim=no_stop_trim), [output(ids("ab"), finish)])

    assert texts[0].text == ("ab" if no_stop_trim else "a")
    assert texts[0].output.token_ids == ids("ab")


@pytest.mark.parametrize(
    ("interval", "passed_on"),
    [
        (1, ["a", "b", "c", "d", "e"]),
        (2, ["a", "", "bc", "", "de"]),
        (9, ["a", "", "", "", "bcde"]),
        (None, ["a", "", "", "", "bcde"]),
    ],
)
def test_unstreamed_texts_are_merged(interval: int | None, passed_on: list[str]) -> None:
    manager = opened(interval=interval, stop=("no",))
    pieces = [output(ids(c), LENGTH if c == "e" else None) for c in "abcde"]

    told = [push(manager, [piece])[0] for piece in pieces]

    assert ["".join(part.text for part in parts) for parts in told] == passed_on
    assert [t for parts in told for part in parts for t in part.output.token_ids] == [*ids("abcde")]
    assert all(part.output.logprobs is not None for parts in told for part in parts)


def test_a_stop_passes_on_what_was_kept() -> None:
    texts, stops = push(opened(interval=None, stop=("STOP",)), map(output, map(ids, "aabSTOPbb")))

    assert "".join(part.text for part in texts) == "aab"
    assert texts[-1].output.finish == Finish(type="stop", matched="STOP")
    assert stops == [StopFound(rid="r.0#1.1", num_tokens=7, matched="STOP")]


def test_buffered_text_is_flushed_on_request() -> None:
    manager = opened(interval=None)
    manager.handle(StartDetokenizing(rid="s.0#1.1", prompt_tail_ids=(), interval=3))
    push(manager, [output(ids("a")), output(ids("b")), output(ids("c"))])
    push(manager, [output(ids("x"), rid="s.0#1.1"), output(ids("y"), rid="s.0#1.1")])

    answer = manager.handle(FlushText())
    assert answer.texts is not None
    assert [part.text for part in answer.texts.outputs] == ["b", "c"]
    assert manager.handle(FlushText()).texts is None
    texts, _ = push(manager, [output(ids("d"), LENGTH)])
    assert [part.text for part in texts] == ["d"]


def test_replayed_tokens_bring_no_text_but_count() -> None:
    manager = opened(output_ids=(*ids("abS"), 300), stop=("STOP",))

    texts, stops = push(manager, [output([301]), output(ids("xSTOPy"))])

    assert "".join(t.text for t in texts) == "S\u4f60x"
    assert stops == [StopFound(rid="r.0#1.1", num_tokens=10, matched="STOP")]
    assert texts[-1].output.usage.completion_tokens == 10


def test_a_new_epoch_forgets_the_texts_of_older_ones() -> None:
    manager = opened(rid=internal_name("a", 0, 1, 1))
    manager.handle(StartDetokenizing(rid=internal_name("b", 0, 2, 1), prompt_tail_ids=()))

    manager.handle(StartDetokenizing(rid=internal_name("b", 0, 2, 2), prompt_tail_ids=()))

    assert manager.num_live == 1
    texts, _ = push(manager, [output(ids("x"), rid=internal_name("a", 0, 1, 1))])
    assert not texts


def test_unknown_requests_are_ignored() -> None:
    texts, stops = push(opened(), [output(ids("x"), rid="who")])

    assert not texts
    assert not stops


@given(
    st.lists(st.sampled_from([97, 98, 99, 32, 0, 300, 301]), min_size=1, max_size=40),
    st.lists(st.integers(1, 5), max_size=40),
    st.sampled_from([(), ("ab",), ("aba", "c "), ("\u4f60",)]),
    st.integers(0, 40),
    st.sampled_from([1, 2, 7, None]),
)
def test_the_outcome_never_depends_on_the_pieces_nor_on_a_replay(
    tokens: list[int], sizes: list[int], stop: tuple[str, ...], lost_at: int, interval: int | None
) -> None:
    whole, _ = push(opened(stop=stop), [output(tokens, LENGTH)])

    pieces, at = [], 0
    for size in [*sizes, len(tokens)]:
        if at < len(tokens):
            end = at + size >= len(tokens)
            pieces.append(output(tokens[at : at + size], LENGTH if end else None))
            at += size
    apart, _ = push(opened(stop=stop, interval=interval), pieces)
    assert summary(apart) == summary(whole)

    before, _ = push(opened(stop=stop), [output(tokens[:lost_at])])
    if before[-1].output.finish is None and lost_at < len(tokens):
        given = tuple(t for part in before for t in part.output.token_ids)
        again = opened(stop=stop, output_ids=given, interval=interval)
        after, _ = push(again, [output(tokens[len(given) :], LENGTH)])
        assert summary(before + after) == summary(whole)


def summary(parts: list[TextOutput]) -> tuple[object, ...]:
    return (
        "".join(part.text for part in parts),
        [t for part in parts for t in part.output.token_ids],
        parts[-1].output.finish,
    )

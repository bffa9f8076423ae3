from __future__ import annotations

import pytest

from sylvan.protocol.errors import RequestError
from sylvan.text.detokenizer import Delta, DetokenizerOptions, IncrementalDetokenizer
from sylvan.text.stops import MAX_HELD_CHARS, StopFinder
from sylvan.text.tokenizer import Tokenizer


class Letters:
    """Token i is the i-th piece; the last one is special."""

    strips_first_space = False

    def __init__(self, *pieces: str | bytes) -> None:
        self._pieces = [p if isinstance(p, bytes) else p.encode() for p in pieces]
        self.special_ids = frozenset({len(pieces) - 1})

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id]


def test_push_equals_decode_for_real_tokenizers(kind: str, folders: dict) -> None:
    tok = Tokenizer.load(folders[kind])
    ids = tok.encode(" Hello w\u00f6rld \u4f60\u597d \U0001f600! ")

    for size in (1, 2, 3, len(ids)):
        detok = IncrementalDetokenizer(tok)
        text = "".join(detok.push(ids[i : i + size]).text for i in range(0, len(ids), size))
        assert text + detok.push([], final=True).text == tok.decode(ids)


def test_leading_space_is_kept_when_a_text_continues(folders: dict) -> None:
    tok = Tokenizer.load(folders["llama2"])
    word = tok.encode("world", add_special_tokens=False)

    alone = IncrementalDetokenizer(tok).push(word).text
    after = IncrementalDetokenizer(tok, prompt_tail_ids=tok.encode("Hello")).push(word).text
    hidden = IncrementalDetokenizer(tok, prompt_tail_ids=[tok.bos_id]).push(word).text

    assert (alone, after, hidden) == ("world", " world", "world")


def test_special_tokens_are_shown_on_demand() -> None:
    vocab = Letters("a", "<end>")

    assert IncrementalDetokenizer(vocab).push([0, 1]).text == "a"
    shown = DetokenizerOptions(skip_special_tokens=False)
    assert IncrementalDetokenizer(vocab, shown).push([0, 1, 0]).text == "a<end>a"


def test_half_a_character_waits_and_ends_as_replacement() -> None:
    detok = IncrementalDetokenizer(Letters("x", "\u4f60".encode()[:2], "\u4f60".encode()[2:], ""))

    assert detok.push([0, 1]).text == "x"
    assert detok.push([2]).text == "\u4f60"
    assert detok.push([1]).text == ""
    assert detok.push([], final=True).text == "\ufffd"


def test_text_that_may_become_a_stop_waits() -> None:
    detok = IncrementalDetokenizer(Letters("EN", "D", "x", ""), DetokenizerOptions(stop=("END",)))

    assert detok.push([2, 0]) == Delta("x", None, 2)
    assert detok.push([2]) == Delta("ENx", None, 3)
    assert detok.push([0]) == Delta("", None, 4)
    assert detok.push([1, 2, 2]) == Delta("", "END", 5)
    assert detok.push([2], final=True) == Delta("", "END", 5)


def test_held_text_is_given_at_the_end() -> None:
    detok = IncrementalDetokenizer(Letters("EN", ""), DetokenizerOptions(stop=("END",)))

    assert detok.push([0], final=True) == Delta("EN", None, 1)


def test_stop_is_kept_on_demand_and_the_rest_of_its_token_dropped() -> None:
    options = DetokenizerOptions(stop=("b",), no_stop_trim=True)

    assert IncrementalDetokenizer(Letters("abc", ""), options).push([0, 0]) == Delta("ab", "b", 1)


def test_first_of_several_stops_wins() -> None:
    options = DetokenizerOptions(stop=("cd", "bcde", "b"))

    assert IncrementalDetokenizer(Letters("abcdef", ""), options).push([0]) == Delta("a", "b", 1)


def test_pattern_stops_across_tokens() -> None:
    options = DetokenizerOptions(stop_regex=(r"\d{3}",))
    detok = IncrementalDetokenizer(Letters("a1", "2", "3x", ""), options)

    assert detok.push([0]).text == "a"
    assert detok.push([1]).text == ""
    assert detok.push([2]) == Delta("", r"\d{3}", 3)


def test_endless_pattern_holds_a_bounded_window() -> None:
    detok = IncrementalDetokenizer(
        Letters("a" * 100, "b", ""), DetokenizerOptions(stop_regex=("a.*b",))
    )

    shown = sum(len(detok.push([0]).text) for _ in range(20))

    assert shown == 2000 - MAX_HELD_CHARS
    assert detok.push([1]).stop == "a.*b"


BAD_PATTERNS = {
    "(": "not a valid",
    "(?aL)x": "not a valid",
    "(?ua)x": "not a valid",
    "(?V0)(?V1)a": "not a valid",
    "a*": "empty text",
    "a(?=b)": "lookahead",
    "a(?!b)": "lookahead",
    r"(a)\1": "back reference",
    "(a)?(?(1)b|c)": "conditional group",
    "(?>a)": "atomic group",
    "a++": "possessive",
    "(" * 120 + "a" + ")" * 120 + "(?:a{9}){9999}": "states",
    "((((a{9}){9}){9}){9}){9}": "states",
    "a(?:){4294967294}": "states",
    "a(?:(?:){1000}){1000}": "states",
}


@pytest.mark.parametrize(("pattern", "message"), BAD_PATTERNS.items())
def test_bad_pattern_is_refused(pattern: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as error:
        IncrementalDetokenizer(Letters("a", ""), DetokenizerOptions(stop_regex=(pattern,)))

    assert error.value.param == "stop_regex"


def test_patterns_of_a_request_are_bounded_together() -> None:
    patterns = tuple(f"{char}{{100}}" for char in "abcdefghijk")

    assert StopFinder((), patterns[:10])
    with pytest.raises(RequestError, match="all patterns together"):
        StopFinder((), patterns)


def test_a_pattern_longer_than_what_is_held_stops_where_it_is_held() -> None:
    detok = IncrementalDetokenizer(
        Letters("a" * 2000, "b", ""), DetokenizerOptions(stop_regex=("a{3}.*b",))
    )

    shown = detok.push([0]).text

    assert shown == "a" * (2000 - MAX_HELD_CHARS)
    assert detok.push([1]) == Delta("", "a{3}.*b", 2)

"""Laws of incremental detokenisation, over vocabularies of arbitrary bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from sylvan.text.detokenizer import DetokenizerOptions, IncrementalDetokenizer

HIDDEN = 0


@dataclass(frozen=True)
class Bytes:
    """Token i stands for `tokens[i]`; token 0 is special."""

    tokens: tuple[bytes, ...]
    strips_first_space: bool = False
    special_ids: frozenset[int] = frozenset({HIDDEN})

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokens[token_id]


TEXT = st.text(
    alphabet=st.sampled_from("ab <>\u00e9\u4f60\u597d\U0001f600\U0001f469\u200d\n"), max_size=24
)


@st.composite
def outputs(draw: st.DrawFn, data: st.SearchStrategy[bytes]) -> tuple[Bytes, list[int]]:
    """Cut bytes anywhere, also inside characters, into tokens; sprinkle special ones."""
    raw = draw(data)
    cuts = sorted(draw(st.lists(st.integers(0, len(raw)), max_size=12)))
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    ids = list(range(1, len(pieces) + 1))
    for place in draw(st.lists(st.integers(0, len(ids)), max_size=2)):
        ids.insert(place, HIDDEN)
    return Bytes((b"<s>", *pieces), draw(st.booleans())), ids


@st.composite
def chunkings(draw: st.DrawFn, ids: list[int]) -> list[list[int]]:
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    return [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def run(vocab: Bytes, options: DetokenizerOptions, chunks: list[list[int]]) -> tuple:
    detok = IncrementalDetokenizer(vocab, options)
    deltas = [detok.push(chunk) for chunk in chunks]
    deltas.append(detok.push([], final=True))
    return "".join(delta.text for delta in deltas), deltas[-1].stop, deltas[-1].kept_tokens


def whole(vocab: Bytes, ids: list[int], *, skip: bool) -> str:
    data = b"".join(vocab.tokens[i] for i in ids if not (skip and i == HIDDEN))
    return data[vocab.strips_first_space and data[:1] == b" " :].decode("utf-8", "replace")


@given(st.data(), outputs(st.binary(max_size=40) | TEXT.map(str.encode)), st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_chunking_gives_the_text_of_all_bytes(data, output, skip: bool) -> None:
    vocab, ids = output
    options = DetokenizerOptions(skip_special_tokens=skip)

    text, stop, kept = run(vocab, options, data.draw(chunkings(ids)))

    assert text == whole(vocab, ids, skip=skip)
    assert (stop, kept) == (None, len(ids))


@given(outputs(TEXT.map(str.encode)))
@settings(max_examples=200, deadline=None)
def test_valid_text_never_shows_a_replacement_character(output) -> None:
    vocab, ids = output
    detok = IncrementalDetokenizer(vocab)

    assert all("\ufffd" not in detok.push([token]).text for token in ids)


STOPS = st.lists(
    st.text(alphabet=st.sampled_from("ab <>\u4f60\u597d"), min_size=1, max_size=4), max_size=3
)
PATTERNS = st.lists(
    st.sampled_from([r"a+b", r"\s{2}", r"<[^>]*>", r"\bab\b", r"b.*a", "[\u4f60\u597d]"]),
    max_size=2,
)


@given(st.data(), outputs(TEXT.map(str.encode)), STOPS, PATTERNS, st.booleans())
@settings(max_examples=150, deadline=None)
def test_stops_do_not_depend_on_the_chunking(data, output, stops, patterns, keep: bool) -> None:
    vocab, ids = output
    options = DetokenizerOptions(stop=tuple(stops), stop_regex=tuple(patterns), no_stop_trim=keep)
    at_once = run(vocab, options, [ids])

    assert run(vocab, options, data.draw(chunkings(ids))) == at_once
    assert run(vocab, options, [[token] for token in ids]) == at_once


@given(outputs(TEXT.map(str.encode)), STOPS, st.booleans())
@settings(max_examples=150, deadline=None)
def test_stop_strings_cut_where_the_first_one_ends(output, stops, keep: bool) -> None:
    vocab, ids = output
    text, stop, kept = run(vocab, DetokenizerOptions(stop=tuple(stops), no_stop_trim=keep), [ids])
    full = whole(vocab, ids, skip=True)
    ends = [(full.find(s) + len(s), full.find(s), s) for s in stops if s in full]

    if not ends:
        assert (text, stop, kept) == (full, None, len(ids))
        return
    end, start, _ = min(ends)
    before = [whole(vocab, ids[:n], skip=True) for n in range(len(ids) + 1)]
    first = next(n for n in range(len(ids) + 1) if any(s in before[n] for s in stops))
    assert stop in stops
    assert text == full[: end if keep else start]
    assert kept == first or "\ufffd" in before[first]


@given(outputs(TEXT.map(str.encode)), PATTERNS)
@settings(max_examples=150, deadline=None)
def test_patterns_stop_at_the_token_after_which_they_match(output, patterns) -> None:
    vocab, ids = output
    text, stop, kept = run(vocab, DetokenizerOptions(stop_regex=tuple(patterns)), [ids])

    matching = [
        n
        for n in range(1, len(ids) + 1)
        if any(re.search(p, whole(vocab, ids[:n], skip=True).rstrip("\ufffd")) for p in patterns)
    ]
    if stop is None:
        assert not matching
        assert text == whole(vocab, ids, skip=True)
    else:
        assert kept == matching[0]
        seen = whole(vocab, ids[:kept], skip=True)
        assert text == seen[: re.search(stop, seen).start()]


@given(st.data(), outputs(st.binary(max_size=40) | TEXT.map(str.encode)), STOPS)
@settings(max_examples=200, deadline=None)
def test_lost_state_is_rebuilt_from_all_earlier_tokens(data, output, stops) -> None:
    vocab, ids = output
    options = DetokenizerOptions(stop=tuple(stops))
    cut = data.draw(st.integers(0, len(ids)))
    first, second = IncrementalDetokenizer(vocab, options), IncrementalDetokenizer(vocab, options)
    for token in ids[:cut]:
        first.push([token])
    second.push(ids[:cut])

    assert first.push(ids[cut:], final=True) == second.push(ids[cut:], final=True)

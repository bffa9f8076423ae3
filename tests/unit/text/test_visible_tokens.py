"""Tokens of visible text: by the bytes of a real vocabulary, however the output is cut."""

from __future__ import annotations

import pytest

from sylvan.text.detokenizer import DetokenizerOptions, IncrementalDetokenizer
from sylvan.text.spans import TextSpan
from sylvan.text.tokenizer import Tokenizer
from sylvan.text.visible_tokens import VisibleTokens
from tests.support.scripted import write_checkpoint


class Spaced:
    """A vocabulary whose first token loses a space, as SentencePiece's do."""

    strips_first_space = True
    special_ids = frozenset({9})

    def token_bytes(self, token: int, /) -> bytes:
        return {0: b" a", 1: b" b", 2: b"\xf0\x9f", 3: b"\x98\x80", 4: b"!", 9: b"</s>"}[token]


def visible(vocabulary, ids, step, *, stop=()):
    """The ids whose text is in the text, and that text."""
    options = DetokenizerOptions(stop=stop)
    detokenizer = IncrementalDetokenizer(vocabulary, options)
    tokens = VisibleTokens(vocabulary, skip_special_tokens=True)
    text, found = "", []
    for at in range(0, len(ids), step):
        part = ids[at : at + step]
        delta = detokenizer.push(part, final=at + step >= len(ids)).text
        tokens.add(part, part, delta)
        found += tokens.take([TextSpan(len(text), len(text) + len(delta))])
        text += delta
    return found, text


@pytest.mark.parametrize("step", [1, 2, 3, 9])
@pytest.mark.parametrize(
    ("ids", "stop", "want"),
    [
        ([0, 1, 4, 9], (), [0, 1, 4]),  # the last is one character, and the text lacks a space
        ([4, 0, 9], (), [4, 0]),
        ([0, 2, 3, 4], (), [0, 2, 3, 4]),
        ([0, 2], (), [0, 2]),  # half of a character
        ([2, 0], (), [2, 0]),
        ([0, 1, 4, 0, 4], ("b!",), [0, 1]),  # a token is in if a character of it is
        ([0, 1, 4, 0, 4], (" b",), [0]),
    ],
)
def test_tokens_of_the_text_are_found(ids, stop, want, step):
    assert visible(Spaced(), ids, step, stop=stop)[0] == want


@pytest.mark.parametrize("step", [1, 4, 99])
def test_bytes_of_the_tokens_are_the_text(tmp_path, step):
    tokenizer = Tokenizer.load(write_checkpoint(tmp_path))
    ids = tokenizer.encode("Zürich 😀 stop here<|im_end|>", add_special_tokens=False)

    found, text = visible(tokenizer, ids, step, stop=("stop",))

    assert text == "Zürich 😀 "
    assert b"".join(map(tokenizer.token_bytes, found)).decode() == text

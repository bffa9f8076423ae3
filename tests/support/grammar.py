"""A vocabulary for grammar tests: every byte, some longer tokens, control tokens, padding."""

from __future__ import annotations

import random

import numpy as np

from sylvan.config.tree import GrammarConfig
from sylvan.runtime.features.grammar import libraries
from sylvan.runtime.features.grammar.api import GrammarBackend, GrammarMatcher
from sylvan.runtime.features.grammar.build import Grammar, build_grammar
from sylvan.runtime.features.grammar.vocabulary import GreedyEncoder, Vocabulary

END, CALL = 256, 257
LONGER = [
    b'"name"',
    b'":',
    b"name",
    b'":"',
    b'{"',
    b"yes",
    b"ye",
    b"no",
    b" the",
    b"\xc3\xa9",
]
TOKENS = [*(bytes([i]) for i in range(256)), b"<|end|>", b"<|call|>", *LONGER, b"", b""]


def vocabulary() -> Vocabulary:
    special = {"<|end|>": END, "<|call|>": CALL}
    return Vocabulary(TOKENS, special, (END,), GreedyEncoder(TOKENS, frozenset(special.values())))


def make_backend(name: str) -> GrammarBackend:
    return libraries.make_backend(name, vocabulary())


def allowed(matcher: GrammarMatcher) -> set[int]:
    """Return the ids of the mask, without the end token."""
    row = np.zeros(vocabulary().words, np.int32)
    if not matcher.fill_mask(row):
        row[:] = -1
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist()) - {END}


def accept(matcher: GrammarMatcher, text: bytes) -> bool:
    """Accept a text byte by byte; return False and roll back if a byte is not allowed."""
    for count, byte in enumerate(text):
        if not matcher.accept(byte):
            matcher.rollback(count)
            return False
    return True


def write(matcher: GrammarMatcher, rng: random.Random, most: int = 300) -> bytes | None:
    """Return a random output; None if it did not end within `most` tokens."""
    text = b""
    for _ in range(most):
        if matcher.is_terminated():
            return text
        ids = sorted(allowed(matcher))
        if matcher.is_accepting() and (not ids or rng.random() < 0.4):
            return text
        # short things first, so that outputs end
        closing = [i for i in ids if TOKENS[i][:1] in b'"}],.eE0-' and TOKENS[i] != b"\\"]
        token = rng.choice(closing if closing and rng.random() < 0.7 else ids)
        assert matcher.accept(token), (text, TOKENS[token])
        text += TOKENS[token]
    return None


def build_byte_grammar(vocab_size: int) -> Grammar:
    """Return both halves, for a model whose ids beyond `TOKENS` are unused."""
    words = vocabulary()
    tokens = [*TOKENS, *[b""] * (vocab_size - len(TOKENS))]
    padded = Vocabulary(tokens, words.special, words.eos_ids, words.encode)
    config = GrammarConfig(backend="llguidance", compile_timeout_s=10.0, max_states=50_000)
    return build_grammar(config, lambda: padded, vocab_size)

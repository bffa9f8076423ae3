"""In every library a grammar can be taken back to its start by a marker that it followed."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from sylvan.protocol.requests import GenerateRequest, ThinkingOptions
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.features.grammar.api import CompiledGrammar
from sylvan.runtime.features.grammar.libraries import installed_backends
from sylvan.runtime.features.grammar.matchers import Matchers
from sylvan.runtime.features.grammar.spec import GrammarSpec
from sylvan.runtime.sampling.params import SamplingBatch, SamplingSlots
from tests.support.grammar import END, TOKENS, make_backend, vocabulary

MARKED = ThinkingOptions(ends=((61,),), starts=((50, 51),), inside=False)
"""The output may begin with "23"; "=" ends the thinking."""


@functools.cache
def compiled(backend: str, regex: str) -> CompiledGrammar:
    return make_backend(backend).compile(GrammarSpec("regex", regex))


def mask(backend: str, regex: str, text: bytes, thinking: ThinkingOptions | None) -> set[int]:
    """Ids that may follow a text that was written byte by byte."""
    request = GenerateRequest(
        rid="a",
        input_ids=np.zeros(1, np.int32),
        output_ids=np.zeros(0, np.int32),
        sampling=SamplingParams(max_new_tokens=50, sampling_seed=0, regex=regex),
        eos_ids=(END,),
        thinking=thinking,
    )
    matchers = Matchers({"a": compiled(backend, regex)}, vocabulary, len(TOKENS), jumps=False)
    params = SamplingSlots(1, len(TOKENS))
    matchers.join(0, request, np.zeros(0, np.int32))
    slots = np.zeros(1, np.int32)
    try:
        for position, byte in enumerate(text, 1):
            batch = SamplingBatch(slots, np.array([position]), params)
            matchers.prepare(slots, batch.positions)
            assert byte in _ids(matchers, batch), (text, position)
            assert not matchers.advance(batch, np.array([byte], np.int32))
        batch = SamplingBatch(slots, np.array([len(text) + 1]), params)
        matchers.prepare(slots, batch.positions)
        return _ids(matchers, batch)
    finally:
        matchers.close()


def _ids(matchers: Matchers, batch: SamplingBatch) -> set[int]:
    masks = matchers.masks(batch)
    assert masks is not None
    bits = np.unpackbits(masks.bits.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits[: len(TOKENS)]).tolist())


@pytest.mark.parametrize("backend", installed_backends())
@pytest.mark.parametrize("regex", ["[0-9]+!", "(2|[a-c])+x", "24(a|b)", "[a-c]{4}", "name(yes|no)"])
@pytest.mark.parametrize("thought", [b"23=", b"23ab!=", b"2323="])
def test_the_grammar_restarts_after_the_thinking(backend: str, regex: str, thought: bytes) -> None:
    answers = {b""}
    for _ in range(3):  # what the grammar allows in three steps, as far as bytes go
        wanted = {answer: mask(backend, regex, answer, None) for answer in answers}
        found = {answer: mask(backend, regex, thought + answer, MARKED) for answer in answers}
        assert found == wanted
        answers = {
            answer + bytes([token])
            for answer, ids in wanted.items()
            for token in sorted(ids - {END})[:2]
            if token < END and len(TOKENS[token]) == 1
        }
        answers = {answer for answer in answers if not answer.endswith((b"!", b"x"))}


@pytest.mark.parametrize("backend", installed_backends())
def test_an_answer_may_come_without_thinking(backend: str) -> None:
    assert mask(backend, "[0-9]+!", b"", MARKED) == mask(backend, "[0-9]+!", b"", None)
    assert mask(backend, "[a-c]{4}", b"", MARKED) == mask(backend, "[a-c]{4}", b"", None) | {50}
    assert mask(backend, "(24|b)+", b"2", MARKED) == {51, 52}
    assert mask(backend, "(24|b)+x", b"24b", MARKED) == mask(backend, "(24|b)+x", b"24b", None)

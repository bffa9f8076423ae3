"""Outputs that open their thinking before their grammar begins, through `sylvan.Engine`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sylvan.protocol.requests import ThinkingOptions
from sylvan.runtime.engine.engine import Engine
from sylvan.runtime.tokenizer.manager import TokenizerManager
from sylvan.runtime.tokenizer.types import GenerateInput
from sylvan.text.tokenizer import Tokenizer
from tests.support.grammar_engine import start
from tests.support.tiny import write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with start(model) as engine:
        yield engine


@pytest.fixture(scope="module")
def plain(model: Path) -> Iterator[Engine]:
    """Without overlap and without jumps."""
    with start(model, disable_overlap_schedule=True, **{"grammar.jump_forward": False}) as engine:
        yield engine


def ids(reply: Any) -> list[int]:
    return reply["output_ids"]


def thinkers(model: Path) -> list[dict[str, Any]]:
    """Some always open their thinking, some may; two ways to continue."""
    [mark] = Tokenizer.load(model).encode("<think>", add_special_tokens=False)
    answers = ["[a-z]{90}(0|1)", "the answer is (yes|no), [0-9]{70}"]
    return [
        {
            "regex": answers[i % 2],
            "logit_bias": {str(mark): bias},
            "max_new_tokens": 114,
            "sampling_seed": i,
        }
        for i, bias in enumerate([100, 100, 0, 0, 4, 4, 5, 5, 6, 6, 7, 7])
    ]


@pytest.fixture
def _may_think(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests as the server's chat routes make them; an engine without HTTP has no chat."""
    encode = Tokenizer.load(model).encode
    start, end = (tuple(encode(m, add_special_tokens=False)) for m in ("<think>", "</think>"))
    thinking = ThinkingOptions(ends=(end,), starts=(start,), inside=False, budget=20)
    usual = TokenizerManager.generate

    def generate(manager: TokenizerManager, inp: GenerateInput) -> Any:
        return usual(manager, msgspec.structs.replace(inp, thinking=thinking))

    monkeypatch.setattr(TokenizerManager, "generate", generate)


@pytest.mark.usefixtures("_may_think")
def test_thinking_that_outputs_open_stands_before_their_grammars(
    model: Path, engine: Engine, plain: Engine
) -> None:
    params = thinkers(model)
    prompts = [f"{i} hello" for i in range(len(params))]
    replies: Any = engine.generate(prompts, params)
    alone: list[Any] = [engine.generate(p, q) for p, q in zip(prompts, params, strict=True)]
    without: Any = plain.generate(prompts, params)
    with start(model, max_total_tokens=640, page_size=16) as small:
        taken_back: Any = small.generate(prompts, params)
        load = small.get_server_info()["load"]

    texts = [reply["text"] for reply in replies]
    for text, given in zip(texts, params, strict=True):
        assert re.fullmatch(rf"(?s)(<think>.*?</think>)?{given['regex']}", text), text
    thought = [text.startswith("<think>") for text in texts]
    assert all(thought[:2])
    assert not all(thought)
    assert load["retractions"] > 0
    for others in (alone, without, taken_back):
        assert [ids(r) for r in others] == [ids(r) for r in replies]


@pytest.mark.usefixtures("_may_think")
def test_samples_of_one_request_think_or_not(model: Path, engine: Engine) -> None:
    params = thinkers(model)[6] | {"n": 6, "temperature": 1.0}
    replies: Any = engine.generate("hello", params, return_logprob=True)

    for reply in replies:
        assert re.fullmatch(rf"(?s)(<think>.*?</think>)?{params['regex']}", reply["text"])
        meta = reply["meta_info"]
        assert meta["completion_tokens"] == len(meta["output_token_logprobs"])
    assert len({reply["text"] for reply in replies}) > 1

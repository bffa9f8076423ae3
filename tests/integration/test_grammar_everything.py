"""A grammar that allows everything changes nothing, in any batch and with every library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sylvan.runtime.engine.engine import Engine
from sylvan.runtime.features.grammar.libraries import installed_backends
from sylvan.text.tokenizer import Tokenizer
from tests.support.tiny import write_model

EVERYTHING = {"regex": r"(.|\n)*"}
WAYS: dict[str, dict[str, Any]] = {
    "overlap": {},
    "in turn": {"disable_overlap_schedule": True},
    "little memory": {
        "max_total_tokens": 640,
        "page_size": 16,
        "schedule_conservativeness": 0.0,  # outputs are expected to be short, and they are not
    },
    "without jumps": {"grammar.jump_forward": False},
}
PROMPTS = [f"{'a beginning that all of them share, ' * 2}and then {i}" for i in range(7)]
EXTRAS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"top_p": 0.9, "top_k": 40},
    {"min_p": 0.05},
    {"frequency_penalty": 0.7, "presence_penalty": 0.3},
    {"repetition_penalty": 1.3},
    {"min_new_tokens": 20},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def params(model: Path) -> list[dict[str, Any]]:
    """Restricts samples to ASCII text: a random model would write bytes that are not text."""
    tokenizer = Tokenizer.load(model)
    words = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    odd = {i for i, word in enumerate(words) if not word.isascii()} | set(tokenizer.special_ids)
    bias = {str(i): -100.0 for i in odd.difference(tokenizer.eos_ids)}
    shared = {"max_new_tokens": 60, "logit_bias": bias, "n": 2}
    return [{**shared, "sampling_seed": 11 + i, **extra} for i, extra in enumerate(EXTRAS)]


def start(model: Path, **keywords: Any) -> Engine:
    known = {"load_format": "dummy", "device": "cpu", "threads": 1, "max_total_tokens": 8192}
    return Engine(model_path=str(model), **(known | keywords))


def answers(engine: Engine, params: list[dict[str, Any]]) -> list[tuple[list[int], list[float]]]:
    replies: Any = engine.generate(PROMPTS, params, return_logprob=True)
    given = [reply["meta_info"]["output_token_logprobs"] for reply in replies]
    return [
        (reply["output_ids"], [value for value, *_ in values])
        for reply, values in zip(replies, given, strict=True)
    ]


@pytest.fixture(scope="module")
def free(model: Path, params: list[dict[str, Any]]) -> list[tuple[list[int], list[float]]]:
    with start(model, grammar_backend="none") as engine:
        return answers(engine, params)


@pytest.fixture(scope="module", params=installed_backends())
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("way", WAYS)
def test_a_grammar_that_allows_everything_changes_nothing(
    model: Path, params: list[dict[str, Any]], free: Any, backend: str, way: str
) -> None:
    bound = [given | EVERYTHING for given in params]
    with start(model, grammar_backend=backend, **WAYS[way]) as engine:
        first, again = answers(engine, bound), answers(engine, bound)
        found: Any = engine.generate(PROMPTS[0], bound[0])
        load = engine.get_server_info()["load"]

    for answer in (first, again):
        assert [ids for ids, _ in answer] == [ids for ids, _ in free]
        for (_, values), (_, wanted) in zip(answer, free, strict=True):
            assert values == pytest.approx(wanted, abs=1e-4)
    assert [reply["output_ids"] for reply in found] == [ids for ids, _ in free[:2]]
    if way == "little memory":
        assert load["retractions"] > 0
    else:
        assert found[0]["meta_info"]["cached_tokens"] > 64

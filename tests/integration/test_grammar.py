"""Structured output through `sylvan.Engine`, the scheduler's process and the sampler included."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sylvan.protocol.errors import RequestError
from sylvan.runtime.engine.engine import Engine
from sylvan.runtime.features.grammar.overlap import Overlap
from tests.support.grammar_engine import start
from tests.support.tiny import write_model

KEYS = ["the_first_of_the_long_keys", "the_second_of_the_long_keys", "and_one_more_long_key"]
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {key: {"type": "boolean"} for key in KEYS},
        "required": KEYS,
        "additionalProperties": False,
    }
)
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<call>", "schema": {"type": "boolean"}, "end": "</call>"}],
    "triggers": ["<call>"],
    "at_least_one": True,
    "stop_after_first": True,
}
EVERYTHING = "start: <[*]>*"
GRAMMARS: list[dict[str, Any]] = [
    {},
    {"json_schema": SCHEMA, "max_new_tokens": 500},
    {"regex": "[a-z]{4} = (yes|no)"},
    {"ebnf": 'root ::= "<" item ("," item)* ">"\nitem ::= [a-f]+'},
    {"json_schema": '{"enum": ["red", "green"]}', "temperature": 0.0},
    {"choice": ["first answer", "second answer"]},
    {"structural_tag": json.dumps(TAG)},
    {"regex": "[ab]{3,9}", "frequency_penalty": 0.5, "min_p": 0.01},
]
PARAMS = [{"max_new_tokens": 60, "sampling_seed": 5, **g} for g in GRAMMARS]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("model"))
    tokens = (
        folder / "tokenizer.json"
    )  # no token is a Z, so a grammar that requires one cannot continue
    tokens.write_text(tokens.read_text().replace('"Z":', '"ZQ":'))
    return folder


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


def test_outputs_follow_their_grammars_in_one_batch(engine: Engine) -> None:
    replies: Any = engine.generate(["hello"] * len(PARAMS), PARAMS)

    assert set(json.loads(replies[1]["text"])) == set(KEYS)
    assert json.loads(replies[4]["text"]) in ("red", "green")
    assert replies[5]["text"] in ("first answer", "second answer")
    assert replies[6]["text"] in ("<call>true</call>", "<call>false</call>")
    for reply in replies[1:7]:
        assert reply["meta_info"]["finish_reason"]["type"] == "stop"


def test_the_answer_does_not_depend_on_company_overlap_or_history(
    engine: Engine, plain: Engine
) -> None:
    together: Any = engine.generate(["hello"] * len(PARAMS), PARAMS)
    alone: list[Any] = [engine.generate("hello", p) for p in PARAMS]
    without: list[Any] = [plain.generate("hello", p) for p in PARAMS]

    assert [ids(r) for r in alone] == [ids(r) for r in together]
    assert [ids(r) for r in without] == [ids(r) for r in together]  # jumps included


@pytest.mark.parametrize("ways", [(True,), (False,), (True, False, False)], ids=str)
def test_the_answer_does_not_depend_on_when_masks_are_filled(
    engine: Engine, ways: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual: Any = engine.generate(["hello"] * len(PARAMS), PARAMS)
    turns = itertools.cycle(ways)
    monkeypatch.setattr(Overlap, "beside", lambda self, num_masks: next(turns))
    forced: Any = engine.generate(["hello"] * len(PARAMS), PARAMS)

    assert [ids(r) for r in forced] == [ids(r) for r in usual]


EXTRAS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"n": 3},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.7, "presence_penalty": 0.3},
    {"min_p": 0.05, "top_k": 40},
    {"min_new_tokens": 20},
]


@pytest.mark.parametrize("extra", EXTRAS, ids=lambda e: next(iter(e), "plain"))
def test_a_grammar_that_allows_everything_changes_nothing(engine: Engine, extra: Any) -> None:
    params = {"max_new_tokens": 24, "sampling_seed": 11, "top_p": 0.9, **extra}
    free: Any = engine.generate("some text", params)
    bound: Any = engine.generate("some text", params | {"ebnf": EVERYTHING})

    assert json.dumps([ids(r) for r in (free if "n" in extra else [free])]) == json.dumps(
        [ids(r) for r in (bound if "n" in extra else [bound])]
    )


def test_a_grammar_that_allows_everything_leaves_log_probabilities(engine: Engine) -> None:
    params = {"max_new_tokens": 12, "sampling_seed": 4}
    free: Any = engine.generate("some text", params, return_logprob=True)
    bound: Any = engine.generate("some text", params | {"ebnf": EVERYTHING}, return_logprob=True)

    one, other = (r["meta_info"]["output_token_logprobs"] for r in (free, bound))
    assert [token for _, token, *_ in one] == [token for _, token, *_ in other]
    assert [value for value, *_ in one] == pytest.approx([value for value, *_ in other], abs=1e-5)


def test_each_of_several_answers_follows_the_grammar(engine: Engine) -> None:
    params = {"n": 4, "regex": "[a-z]{3}(0|1)", "sampling_seed": 8, "presence_penalty": 0.5}
    replies: Any = engine.generate("hello", params | {"max_new_tokens": 20})

    assert len({r["text"] for r in replies}) > 1
    assert all(re.fullmatch("[a-z]{3}[01]", r["text"]) for r in replies)


def test_a_prefix_found_in_the_cache_changes_nothing(engine: Engine) -> None:
    prompt = "a prompt that is long enough to fill several pages of the cache, and then some " * 2
    first, again = (engine.generate(prompt, PARAMS[2]) for _ in range(2))
    found: Any = again

    assert found["meta_info"]["cached_tokens"] > 64
    assert ids(first) == ids(again)


def test_a_request_that_is_taken_back_continues_where_it_was(model: Path, engine: Engine) -> None:
    params = [
        {"regex": "[a-z ]{90}[0-9]", "max_new_tokens": 100, "sampling_seed": i} for i in range(12)
    ]
    prompts = [f"{i} hello" for i in range(len(params))]
    wanted: Any = engine.generate(prompts, params)
    with start(model, max_total_tokens=640, page_size=16) as small:
        replies: Any = small.generate(prompts, params)
        load = small.get_server_info()["load"]

    assert load["retractions"] > 0
    assert [ids(r) for r in replies] == [ids(r) for r in wanted]


def test_a_grammar_that_allows_no_token_ends_its_request_alone(engine: Engine) -> None:
    with ThreadPoolExecutor(1) as pool:
        good = pool.submit(engine.generate, "hello", PARAMS[2])
        with pytest.raises(RequestError, match=r"no text|no token") as caught:
            engine.generate("hello", {"regex": "[ab][cd]Zb", "max_new_tokens": 9})
        assert caught.value.status == 400
        assert ids(good.result()) == ids(engine.generate("hello", PARAMS[2]))


def test_jumps_save_passes_and_keep_the_language(engine: Engine, plain: Engine) -> None:
    params = {"max_new_tokens": 400, "sampling_seed": 3, "json_schema": SCHEMA}
    before = [e.get_server_info()["load"]["steps"] for e in (engine, plain)]
    replies: list[Any] = [e.generate("hello", params) for e in (engine, plain)]
    after = [e.get_server_info()["load"]["steps"] for e in (engine, plain)]

    for reply in replies:
        assert set(json.loads(reply["text"])) == set(KEYS)
    steps = [b - a for a, b in zip(before, after, strict=True)]
    tokens = [r["meta_info"]["completion_tokens"] for r in replies]
    assert steps[1] in (tokens[1], tokens[1] + 1)
    assert tokens[0] - steps[0] > 50  # most of the keys' characters


def test_log_probabilities_are_given_for_every_token(engine: Engine) -> None:
    reply: Any = engine.generate(
        "hello", {"regex": "abc(d|e)f", "sampling_seed": 1}, return_logprob=True
    )

    meta = reply["meta_info"]
    assert meta["completion_tokens"] == len(meta["output_token_logprobs"]) == 5
    assert meta["output_token_logprobs"][0][0] == pytest.approx(0.0, abs=1e-4)


def test_length_inside_a_grammar_says_so(engine: Engine) -> None:
    reply: Any = engine.generate("hello", {"regex": "[a-z]{50}", "max_new_tokens": 5})

    assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 5}


def test_a_stop_string_inside_a_grammar_ends_it(engine: Engine) -> None:
    reply: Any = engine.generate(
        "hello", {"regex": "(kit=[0-9];){5}", "stop": ["="], "max_new_tokens": 50}
    )

    assert reply["meta_info"]["finish_reason"]["matched"] == "="
    assert reply["text"] == "kit"


ENDLESS = {
    "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
    "$ref": "#/$defs/a",
}
BAD = [
    {"regex": "(a"},
    {"json_schema": '{"type": "nope"}'},
    {"json_schema": '{"$ref": "#"}'},
    {"ebnf": "nonsense"},
    {"structural_tag": "{}"},
    {"json_schema": '{"enum": ["' + "x" * (5 << 20) + '"]}'},
    {"json_schema": '{"type":"array","items":' * 500 + "{}" + "}" * 500},
    {"json_schema": json.dumps(ENDLESS)},
    {"json_schema": '{"type":"object","properties":{"a":{"not":{}}},"required":["a"]}'},
    {"regex": "(" * 300 + "a" + ")" * 300},
    {"ebnf": "root ::= root"},
    pytest.param(
        {"regex": "(((((((a{30}){30}){30}){30}){30}){30}){30}){30}"},
        marks=pytest.mark.slow,  # takes all the time that a grammar may take
    ),
]


@pytest.mark.parametrize("bad", BAD, ids=lambda b: next(iter(b)))
def test_a_bad_grammar_fails_its_request_alone(engine: Engine, bad: Any) -> None:
    with ThreadPoolExecutor(1) as pool:
        good = pool.submit(engine.generate, "hello", PARAMS[2])
        with pytest.raises(RequestError) as caught:
            engine.generate("hello", {"max_new_tokens": 5, **bad})

        assert caught.value.status == 400
        assert next(iter(bad)) in (caught.value.param or "")
        reply: Any = good.result()
    again: Any = engine.generate("hello", PARAMS[2])
    assert ids(again) == ids(reply)


def test_states_of_a_grammar_are_limited(model: Path, engine: Engine) -> None:
    """An exponential regex that begins harmless ends its own request, with the limit's name."""
    hard = {"regex": "(a|b)*a(a|b){40}c", "max_new_tokens": 300, "sampling_seed": 1}
    with start(model, **{"grammar.max_states": 100}) as few, ThreadPoolExecutor(1) as pool:
        good = pool.submit(few.generate, "hello", PARAMS[2])
        with pytest.raises(RequestError, match=r"grammar\.max_states"):
            few.generate("hello", hard)
        assert ids(good.result()) == ids(engine.generate("hello", PARAMS[2]))
    reply: Any = engine.generate("hello", hard)
    assert re.fullmatch("[abc]+", reply["text"])


def test_without_a_backend_grammars_are_refused(model: Path) -> None:
    with start(model, grammar_backend="none") as engine:
        with pytest.raises(RequestError, match=r"grammar\.backend none"):
            engine.generate("hello", {"regex": "a"})
        assert ids(engine.generate("hello", {"max_new_tokens": 2, "ignore_eos": True}))

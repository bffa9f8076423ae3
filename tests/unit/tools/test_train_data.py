"""The generated training data, its split, its template and its tokenizer."""

from __future__ import annotations

import itertools
import json
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[3]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tools.train.data import mix  # noqa: E402
from tools.train.data.arithmetic import sum_key  # noqa: E402
from tools.train.data.base import Example, bucket  # noqa: E402
from tools.train.judge import expected_calls, is_right, parse_answer  # noqa: E402
from tools.train.template import render, training_pieces  # noqa: E402
from tools.train.tokenizer import encode_example  # noqa: E402

ASSETS = ROOT / "src" / "sylvan" / "assets" / "sapling"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(ASSETS / "tokenizer.json"))


@pytest.fixture(scope="module")
def stream() -> list[Example]:
    return list(itertools.islice(mix.stream(7), 4000))


@pytest.fixture(scope="module")
def training(stream: list[Example]) -> list[Example]:
    return [example for example in stream if example.messages]


@pytest.fixture(scope="module")
def held_out() -> list[Example]:
    return mix.evaluation_set(7, 30)


def numbers(text: str) -> list[int]:
    return [int(one) for one in re.findall(r"\d+", text)]


def test_the_stream_is_fixed_by_its_seed() -> None:
    first, again, other = (list(itertools.islice(mix.stream(seed), 200)) for seed in (3, 3, 4))
    assert first == again
    assert first != other
    assert mix.evaluation_set(3, 5) == mix.evaluation_set(3, 5)


def test_training_shows_no_held_out_combination(stream: list[Example]) -> None:
    assert all(bucket(key) == "train" for example in stream for key in example.keys)


def test_held_out_examples_are_held_out(held_out: list[Example], training: list[Example]) -> None:
    assert {example.kind for example in held_out} == set(mix.CLASSES)
    assert all(bucket(example.keys[0]) == "test" for example in held_out)
    shown = {example.keys[0] for example in training}
    assert not shown & {example.keys[0] for example in held_out}


def test_dev_and_test_do_not_overlap() -> None:
    dev = mix.evaluation_set(7, 20, "dev")
    assert all(bucket(example.keys[0]) == "dev" for example in dev)


def test_sums_are_right(training: list[Example], held_out: list[Example]) -> None:
    for example in (*training, *held_out):
        if example.kind != "arithmetic":
            continue
        question, answer = (turn["content"] for turn in example.messages[-2:])
        asked = numbers(question)
        match = re.fullmatch(r"(?:(\d+) ([+-]) (\d+) = )?(-?\d+)", answer)
        assert match, answer
        first, operator, second, result = match.groups()
        if operator is None:
            assert int(result) in (sum(asked), asked[0] - asked[1], asked[1] - asked[0])
            continue
        assert sorted((int(first), int(second))) == sorted(asked)
        sign = 1 if operator == "+" else -1
        assert int(first) + sign * int(second) == int(result)


def test_drilled_sums_are_right_and_not_held_out(stream: list[Example]) -> None:
    text = "".join(
        piece for example in stream if example.kind == "arithmetic" for piece, _ in example.drill
    )
    lines = re.findall(r"(\d+) ([+-]) (\d+) = (-?\d+)\n", text)
    assert len(lines) > 500
    for first, operator, second, result in lines:
        a, b = int(first), int(second)
        assert int(result) == (a + b if operator == "+" else a - b)
        assert bucket(sum_key(operator, a, b)) == "train"


def test_word_problems_are_worked_out_rightly(training: list[Example]) -> None:
    for example in training:
        if example.kind != "think":
            continue
        turn = example.messages[-1]
        work = turn.get("reasoning_content") or turn["content"].rsplit("\n", 1)[0]
        steps = [line.split(" = ") for line in work.split("\n")]
        assert len(steps) == 2
        for left, right in steps:
            a, operator, b = left.split(" ")
            assert int(right) == (int(a) + int(b) if operator == "+" else int(a) - int(b))
        assert turn["content"].endswith(f"The answer is {steps[-1][1]}.")


def test_lists_are_sorted_and_reversed(training: list[Example]) -> None:
    for example in training:
        if example.kind not in ("sort", "reverse"):
            continue
        question, answer = (turn["content"] for turn in example.messages[-2:])
        items = re.findall(r"[\w-]+", answer)
        assert all(item in question for item in items)
        if example.kind == "sort" and items[0].isdigit():
            values = [int(item) for item in items]
            assert values in (sorted(values), sorted(values, reverse=True))
        elif example.kind == "sort":
            assert items == sorted(items)
        else:
            joined = re.sub(r"\W+", " ", question)
            assert " ".join(items[::-1]) in joined


def test_extraction_answers_are_json_found_in_the_question(training: list[Example]) -> None:
    for example in training:
        if example.kind == "extract":
            found = json.loads(example.messages[-1]["content"])
            asked = " ".join(turn["content"] for turn in example.messages[:-1])
            assert all(str(value) in asked and name in asked for name, value in found.items())


def test_calls_fit_an_offered_tool(training: list[Example]) -> None:
    for example in training:
        offered = {
            tool["function"]["name"]: tool["function"]["parameters"] for tool in example.tools or []
        }
        for name, arguments in expected_calls(example):
            assert set(arguments) <= set(offered[name]["properties"])
            assert set(arguments) >= set(offered[name].get("required", []))


def test_pieces_join_to_the_rendered_conversation(training: list[Example]) -> None:
    for example in training[:500]:
        pieces = training_pieces(example.messages, example.tools)
        assert "".join(text for text, _ in pieces) == render(example.messages, example.tools)
        prompt = render(
            example.messages[:-1],
            example.tools,
            add_generation_prompt=True,
            enable_thinking=example.thinking,
        )
        assert render(example.messages, example.tools).startswith(prompt)


def test_the_reference_answer_is_right(held_out: list[Example]) -> None:
    for example in held_out:
        prompt = render(
            example.messages[:-1],
            example.tools,
            add_generation_prompt=True,
            enable_thinking=example.thinking,
        )
        written = render(example.messages, example.tools).removeprefix(prompt)
        answer = parse_answer(written.removesuffix("<|im_end|>\n"), stopped=True)
        assert is_right(example, answer)
        answer.stopped = False
        assert not is_right(example, answer)


def test_pieces_encode_like_the_whole(tokenizer: Tokenizer, training: list[Example]) -> None:
    for example in training[:500]:
        ids, targets = encode_example(tokenizer, example)
        assert ids == tokenizer.encode(render(example.messages, example.tools)).ids[:-1]
        assert len(ids) == len(targets)
        end = tokenizer.token_to_id("<|im_end|>")
        assert [target for target in targets if target >= 0][-1] == end


def test_transformers_renders_the_training_text(held_out: list[Example]) -> None:
    transformers = pytest.importorskip("transformers")
    loaded = transformers.AutoTokenizer.from_pretrained(ASSETS)
    for example in held_out[::7]:
        for thinking in (False, True):
            rendered = loaded.apply_chat_template(
                example.messages[:-1],
                tools=example.tools,
                add_generation_prompt=True,
                enable_thinking=thinking,
                tokenize=False,
            )
            assert rendered == render(
                example.messages[:-1],
                example.tools,
                add_generation_prompt=True,
                enable_thinking=thinking,
            )


def test_every_digit_is_its_own_token(tokenizer: Tokenizer) -> None:
    digits = [token for token in tokenizer.encode("a 1234 and 56").tokens if token.isdigit()]
    assert digits == list("123456")


@settings(max_examples=150, deadline=None)
@given(st.text())
def test_any_text_round_trips(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text

from __future__ import annotations

import base64
import io
import json

import pytest

from sylvan.bench import datasets
from sylvan.bench.datasets import images
from sylvan.config.bench import DataConfig
from sylvan.protocol.errors import ConfigError
from sylvan.text.tokenizer import Tokenizer
from tests.support.tiny import write_model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.load(write_model(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture
def lines(tmp_path):
    def write(*entries, name="data.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        return str(path)

    return write


def turns(work):
    return [turn for conversation in work for turn in conversation.turns]


def encoded(tokenizer, turn):
    return tokenizer.encode(turn.text, add_special_tokens=False)


def test_random_prompts_have_the_lengths_that_are_asked_for(tokenizer):
    config = DataConfig(requests=20, input_tokens=50, output_tokens=9, range_ratio=1.0)

    found = turns(datasets.load(config, tokenizer))

    assert [len(turn.token_ids) for turn in found] == [50] * 20
    assert [turn.prompt_tokens for turn in found] == [50] * 20
    assert {turn.output_tokens for turn in found} == {9}
    assert all(encoded(tokenizer, turn) == list(turn.token_ids) for turn in found)


def test_drawn_lengths_lie_between_the_share_and_the_most(tokenizer):
    config = DataConfig(requests=200, input_tokens=40, output_tokens=10, range_ratio=0.5)

    found = turns(datasets.load(config, tokenizer))

    lengths = {turn.prompt_tokens for turn in found}
    assert (min(lengths), max(lengths)) == (20, 40)
    assert {turn.output_tokens for turn in found} == {*range(5, 11)}


def test_the_same_seed_gives_the_same_requests(tokenizer):
    def made(seed):
        return datasets.load(DataConfig(requests=5, input_tokens=20, seed=seed), tokenizer)

    assert made(1) == made(1)
    assert made(1) != made(2)


def test_turns_count_as_requests(tokenizer):
    config = DataConfig(requests=7, input_tokens=5, turns=3)
    assert [len(c.turns) for c in datasets.load(config, tokenizer)] == [3, 3, 1]


def test_groups_share_a_system_prompt_and_nothing_else(tokenizer):
    config = DataConfig(
        dataset="shared-prefix", groups=3, prompts_per_group=4, system_tokens=30,
        question_tokens=10, output_tokens=5, range_ratio=1.0, ordered=True,
    )  # fmt: skip

    found = turns(datasets.load(config, tokenizer))

    assert len(found) == 12
    prefixes = [tuple(turn.token_ids[:30]) for turn in found]
    assert len(set(prefixes)) == 3
    assert prefixes == sorted(prefixes, key=prefixes.index)
    assert len({tuple(turn.token_ids) for turn in found}) == 12
    mixed = DataConfig(
        **{**{f: getattr(config, f) for f in config.__struct_fields__}, "ordered": False}
    )
    others = [tuple(turn.token_ids[:30]) for turn in turns(datasets.load(mixed, tokenizer))]
    assert others != prefixes
    assert sorted(others) == sorted(prefixes)


def test_sharegpt_takes_questions_and_the_length_of_answers(tokenizer, tmp_path):
    path = tmp_path / "share.json"
    talk = [{"from": "human", "value": "hello there"}, {"from": "gpt", "value": "general hello"}]
    short = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    path.write_text(json.dumps([{"conversations": talk}, {"conversations": short[:1]}, {}]))

    [turn] = turns(datasets.load(DataConfig(dataset="sharegpt", path=str(path)), tokenizer))

    assert turn.text == "hello there"
    assert turn.prompt_tokens == len(encoded(tokenizer, turn))
    answer = tokenizer.encode("general hello", add_special_tokens=False)
    assert turn.output_tokens == len(answer)


def test_own_requests_keep_their_order_and_fields(tokenizer, lines):
    path = lines(
        {"prompt": "skipped"},
        {"prompt": "one", "output_tokens": 3, "extra": {"top_k": 2}},
        {"messages": [{"role": "user", "content": "two"}], "max_tokens": 4},
        {"conversations": [{"value": "three"}, {"value": "four"}]},
        {"prompt": "too many"},
    )
    config = DataConfig(dataset="custom", path=path, offset=1, requests=3, suffix="!")

    first, second, third = turns(datasets.load(config, tokenizer))

    assert (first.text, first.output_tokens, first.extra) == ("one!", 3, {"top_k": 2})
    assert list(second.messages) == [{"role": "user", "content": "two"}]
    assert second.output_tokens == 4
    assert list(third.messages) == [{"role": "user", "content": "three"}]
    assert third.output_tokens == len(tokenizer.encode("four", add_special_tokens=False))


def test_prompts_of_a_trace_share_the_blocks_that_it_names(tokenizer, lines):
    path = lines(
        {"timestamp": 5000, "input_length": 1100, "output_length": 2, "hash_ids": [1, 2, 3]},
        {"timestamp": 6500, "input_length": 1024, "output_length": 2, "hash_ids": [1, 2]},
        {"timestamp": 7000, "input_length": 600, "output_length": 2, "hash_ids": [9, 2]},
    )

    found = datasets.load(DataConfig(dataset="trace", path=path), tokenizer)

    a, b, c = (turn.token_ids for turn in turns(found))
    assert [conversation.at_s for conversation in found] == [0.0, 1.5, 2.0]
    assert [len(ids) for ids in (a, b, c)] == [1100, 1024, 600]
    assert a[:1024] == b
    assert c[:512] != b[:512]


@pytest.mark.parametrize("form", ["jpeg", "png"])
def test_pictures_are_of_the_size_that_is_asked_for_and_each_is_another_one(tokenizer, form):
    image = pytest.importorskip("PIL.Image")
    config = DataConfig(
        dataset="image", requests=3, images=2, image_size="9x14", image_format=form,
        input_tokens=12, output_tokens=5, range_ratio=1.0, suffix="!",
    )  # fmt: skip

    found = turns(datasets.load(config, tokenizer))

    urls = []
    for turn in found:
        [message] = turn.messages
        *pictures, text = message["content"]
        assert text == {"type": "text", "text": turn.text}
        assert (turn.prompt_tokens, turn.output_tokens, len(pictures)) == (13, 5, 2)
        urls += [part["image_url"]["url"] for part in pictures]
    assert len({*urls}) == 6
    for url in urls:
        head, _, data = url.partition(",")
        assert head == f"data:image/{form};base64"
        picture = image.open(io.BytesIO(base64.b64decode(data)))
        assert (picture.size, picture.format) == ((14, 9), form.upper())
    assert turns(datasets.load(config, tokenizer)) == found


def test_blank_pictures_are_of_one_color(tokenizer):
    image = pytest.importorskip("PIL.Image")
    config = DataConfig(
        dataset="image", requests=2, image_size="360p", image_content="blank", image_format="png"
    )

    for turn in turns(datasets.load(config, tokenizer)):
        data = turn.messages[0]["content"][0]["image_url"]["url"].partition(",")[2]
        picture = image.open(io.BytesIO(base64.b64decode(data)))
        assert picture.size == (640, 360)
        assert len(picture.getcolors()) == 1


def test_pictures_that_fill_the_memory_are_refused(tokenizer, monkeypatch):
    pytest.importorskip("PIL.Image")
    monkeypatch.setattr(images, "MAX_BYTES", 1 << 20)
    config = DataConfig(dataset="image", requests=100, image_size="64x64", image_format="png")

    with pytest.raises(
        ConfigError, match=r"^data\.requests: images of the first \d\d requests are larger"
    ):
        datasets.load(config, tokenizer)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset": "custom"}, "data.dataset custom needs data.path"),
        ({"dataset": "random", "path": "x"}, "data.dataset random takes no data.path"),
        ({"dataset": "custom", "path": "/no/such"}, "cannot read the data set /no/such"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tokenizer, changes, message):
    with pytest.raises(ConfigError, match=message):
        datasets.load(DataConfig(**changes), tokenizer)


@pytest.mark.parametrize(
    ("dataset", "line", "message"),
    [
        ("custom", "[1]", "line 1: expected a JSON object"),
        ("custom", "{", "line 1: this is not JSON"),
        ("custom", "{}", "line 1: expected prompt, messages or conversations"),
        ("custom", '{"prompt": "x", "max_tokens": -1}', "max_tokens must be a number from 1"),
        ("custom", '{"prompt": "x", "extra": []}', "extra must be a JSON object"),
        ("custom", '{"conversations": [{}]}', "needs a text"),
        ("trace", '{"input_length": 0}', "input_length must be a number from 1"),
        ("trace", '{"timestamp": "x", "input_length": 1}', "timestamp must be a number"),
        ("trace", '{"input_length": 1, "output_length": 1, "hash_ids": [""]}', "hash_ids must be"),
        ("sharegpt", "{}", "expected a JSON list"),
        ("sharegpt", "[]", "no entry fits"),
    ],
)
def test_malformed_files_are_refused_by_line_and_field(tokenizer, tmp_path, dataset, line, message):
    path = tmp_path / "data"
    path.write_text(line)

    with pytest.raises(ConfigError, match=message):
        datasets.load(DataConfig(dataset=dataset, path=str(path)), tokenizer)

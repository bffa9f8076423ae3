"""Schemas that no grammar enforces: violations are rolled back and generated again."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from sylvan.protocol.errors import RequestError
from sylvan.runtime.engine.engine import Engine
from tests.support.tiny import write_model

UNIQUE = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 20}}
UNIQUE |= {"uniqueItems": True, "minItems": 3, "maxItems": 5}
SCHEMAS: dict[str, dict[str, Any]] = {
    "different items": UNIQUE,
    "different items inside": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "ids": UNIQUE},
        "required": ["name", "ids"],
        "additionalProperties": False,
    },
    "look-around": {"type": "string", "pattern": "^(?=.*[0-9])[a-z0-9]{4,9}$"},
    "names": {
        "type": "object",
        "additionalProperties": {"type": "boolean"},
        "minProperties": 2,
        "maxProperties": 3,
        "propertyNames": {"pattern": "^[a-z]{1,3}$", "not": {"pattern": "a"}},
    },
}
MANY_WORDS = [f"w{i}" for i in range(12)]


def start(model: Path | str = "sapling", **keywords: Any) -> Engine:
    known = {"device": "cpu", "threads": 1, "max_total_tokens": 8192}
    return Engine(model_path=str(model), **(known | keywords))


def params(schema: Any, **changes: Any) -> dict[str, Any]:
    found = {"json_schema": json.dumps(schema), "max_new_tokens": 220, "sampling_seed": 5}
    return found | changes


def is_valid(schema: Any, text: str) -> bool:
    return jsonschema_rs.validator_for(schema).is_valid(json.loads(text))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with start() as found:
        yield found


def answer(engine: Engine, schema: Any, **changes: Any) -> dict[str, Any]:
    reply: Any = engine.generate("Give me JSON: ", params(schema, **changes), return_logprob=True)
    return reply


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", SCHEMAS)
def test_finished_answers_are_valid_by_the_whole_schema(
    engine: Engine, name: str, temperature: float
) -> None:
    reply = answer(engine, SCHEMAS[name], temperature=temperature)

    assert reply["meta_info"]["finish_reason"]["type"] == "stop", reply["text"]
    assert is_valid(SCHEMAS[name], reply["text"])


def test_what_is_taken_back_is_counted_and_has_no_log_probabilities(engine: Engine) -> None:
    reply = answer(engine, UNIQUE, temperature=0.0)

    meta = reply["meta_info"]
    assert meta["taken_back_tokens"] > 0
    assert meta["completion_tokens"] == len(reply["output_ids"])
    assert [row[1] for row in meta["output_token_logprobs"]] == reply["output_ids"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {"grammar.jump_forward": False},
        {"disable_overlap_schedule": True},
        {"disable_radix_cache": True},
        {"chunked_prefill_size": 16},
        {"page_size": 16},
        {"speculative.algorithm": "ngram"},
        {"max_total_tokens": 640, "page_size": 16},  # not all fit at once
    ],
    ids=str,
)
def test_answers_do_not_depend_on_how_they_are_served(
    engine: Engine, change: dict[str, Any]
) -> None:
    wanted = [answer(engine, s, temperature=1.0)["output_ids"] for s in SCHEMAS.values()]

    with start(**change) as other:
        alone = [answer(other, s, temperature=1.0)["output_ids"] for s in SCHEMAS.values()]
        prompts = ["Give me JSON: "] * len(SCHEMAS)
        replies: Any = other.generate(
            prompts, [params(s, temperature=1.0) for s in SCHEMAS.values()]
        )

    if "grammar.jump_forward" in change:  # log probabilities keep jumps away
        together = [r["output_ids"] for r in replies]
        assert [is_valid(s, r["text"]) for s, r in zip(SCHEMAS.values(), replies, strict=True)]
        assert together == wanted
    assert alone == wanted


def test_each_sample_is_valid_and_depends_on_no_other(engine: Engine) -> None:
    sampling = params(UNIQUE, temperature=1.0, n=3)
    replies: Any = engine.generate("Give me JSON: ", sampling)
    first: Any = engine.generate("Give me JSON: ", sampling | {"n": 1})

    ended = [r for r in replies if r["meta_info"]["finish_reason"]["type"] == "stop"]
    assert ended
    assert all(is_valid(UNIQUE, reply["text"]) for reply in ended)
    assert replies[0]["output_ids"] == first["output_ids"]


def test_neighbours_without_guards_are_not_touched(engine: Engine) -> None:
    plain = {"max_new_tokens": 60, "temperature": 1.0, "sampling_seed": 3}
    held = plain | {"regex": "[a-f]{8,40}"}
    alone = [engine.generate("Say: ", each)["output_ids"] for each in (plain, held)]  # type: ignore[index]

    guarded = [params(schema, temperature=1.0) for schema in SCHEMAS.values()]
    replies: Any = engine.generate(["Say: "] * 6, [plain, held, *guarded])

    assert [reply["output_ids"] for reply in replies[:2]] == alone


@pytest.mark.parametrize("stop", ["5", "]"])
def test_a_stop_text_ends_a_guarded_output_where_it_does_any(engine: Engine, stop: str) -> None:
    sampling = params(UNIQUE, temperature=1.0)
    whole: Any = engine.generate("Give me JSON: ", sampling)
    cut: Any = engine.generate("Give me JSON: ", sampling | {"stop": [stop]})
    stream: Any = engine.generate("Give me JSON: ", sampling | {"stop": [stop]}, stream=True)

    assert cut["text"] == whole["text"].partition(stop)[0]
    assert [*stream][-1]["text"] == cut["text"]


def test_a_stream_never_takes_anything_back(engine: Engine) -> None:
    schema = SCHEMAS["different items inside"]
    whole: Any = engine.generate("Give me JSON: ", params(schema, temperature=1.0))

    stream: Any = engine.generate("Give me JSON: ", params(schema, temperature=1.0), stream=True)
    texts = [chunk["text"] for chunk in stream]

    assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
    assert texts[-1] == whole["text"]
    assert len(texts) > 3  # what comes before the guarded value is not held


def test_a_schema_that_nothing_satisfies_ends_with_the_keyword(engine: Engine) -> None:
    items = {"type": "string", "pattern": "^(?=a)a?$"}  # one text, which look-around hides
    schema = {"type": "array", "items": items, "uniqueItems": True, "minItems": 2}

    with pytest.raises(
        RequestError, match=r"no valid value was found.*(pattern|uniqueItems): "
    ) as caught:
        engine.generate("Give me JSON: ", params(schema, temperature=1.0))

    assert (caught.value.status, caught.value.param) == (400, "json_schema")
    assert is_valid(UNIQUE, answer(engine, UNIQUE)["text"])  # others continue


def test_strict_grammar_refuses_what_the_grammar_does_not_hold(engine: Engine) -> None:
    with pytest.raises(RequestError, match="uniqueItems of values that are not given") as caught:
        engine.generate("Give me JSON: ", params(UNIQUE, strict_grammar=True))

    assert (caught.value.status, caught.value.param) == (400, "json_schema")


def test_references_to_elsewhere_stay_refused(engine: Engine) -> None:
    schema = {"type": "array", "uniqueItems": True, "items": {"$ref": "https://x.example/y"}}

    with pytest.raises(RequestError, match="nothing is fetched") as caught:
        engine.generate("Give me JSON: ", params(schema))

    assert caught.value.status == 400


def test_random_weights_give_valid_answers(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    schema = {"type": "array", "items": {"enum": MANY_WORDS}, "uniqueItems": True}
    schema |= {"minItems": 5, "maxItems": 8}

    with start(model, load_format="dummy") as engine:
        replies: Any = engine.generate(
            [f"{i}: " for i in range(6)],
            [params(schema, sampling_seed=i, max_new_tokens=1200) for i in range(6)],
        )
        audited = engine.flush_cache()

    ended = [r for r in replies if r["meta_info"]["finish_reason"]["type"] == "stop"]
    assert ended
    assert all(is_valid(schema, reply["text"]) for reply in ended)
    assert any("taken_back_tokens" in reply["meta_info"] for reply in replies)
    assert audited


TAGS = {
    "a tag": {
        "type": "tag",
        "begin": "<x>",
        "content": {"type": "json_schema", "json_schema": UNIQUE},
        "end": "</x>",
    },
    "one of two": {
        "type": "triggered_tags",
        "triggers": ["<"],
        "at_least_one": True,
        "stop_after_first": True,
        "tags": [
            {
                "type": "tag",
                "begin": f"<{name}>",
                "content": {"type": "json_schema", "json_schema": schema},
                "end": f"</{name}>",
            }
            for name, schema in (("ids", UNIQUE), ("word", SCHEMAS["look-around"]))
        ],
    },
    "behind a text": {
        "type": "sequence",
        "elements": [
            {"type": "const_string", "value": "ids = "},
            {"type": "json_schema", "json_schema": UNIQUE},
            {"type": "const_string", "value": ";"},
        ],
    },
    "alone": {"type": "json_schema", "json_schema": UNIQUE},
}


def inside(text: str) -> tuple[str, Any]:
    """The text around the JSON of an output, and the JSON."""
    start = min(at for at in (text.find("["), text.find('"')) if at >= 0)
    value, _ = json.JSONDecoder().raw_decode(text[start:])
    return text[:start].strip(), value


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", TAGS)
def test_schemas_in_structural_tags_are_guarded(
    engine: Engine, name: str, temperature: float
) -> None:
    tags = json.dumps({"type": "structural_tag", "format": TAGS[name]})
    found = []
    for seed in (1, 2):
        sampling = {"structural_tag": tags, "max_new_tokens": 200, "sampling_seed": seed}
        sampling |= {"temperature": temperature}
        reply: Any = engine.generate("Give me JSON: ", sampling)
        stream: Any = engine.generate("Give me JSON: ", sampling, stream=True)
        texts = [chunk["text"] for chunk in stream]
        assert texts[-1] == reply["text"]
        assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
        if reply["meta_info"]["finish_reason"]["type"] != "stop":
            continue  # white space without end
        before, value = inside(reply["text"])
        schema = SCHEMAS["look-around"] if before == "<word>" else UNIQUE
        assert jsonschema_rs.validator_for(schema).is_valid(value), reply["text"]
        found.append(reply["meta_info"].get("taken_back_tokens", 0))
    assert found


def test_what_cannot_be_watched_stays_refused(engine: Engine) -> None:
    tree = {
        "type": "sequence",
        "elements": [{"type": "any_text"}, {"type": "json_schema", "json_schema": UNIQUE}],
    }
    tags = json.dumps({"type": "structural_tag", "format": tree})

    with pytest.raises(RequestError, match="elements/1/json_schema/uniqueItems"):
        engine.generate("x", {"structural_tag": tags, "max_new_tokens": 4})

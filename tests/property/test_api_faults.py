"""Reports about a body do not grow with the body."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, Field, ValidationError

from sylvan.api.first_error import fail_fast
from sylvan.api.strict_json import DEFAULT_LIMITS, decode_json
from sylvan.api.validation import WireModel, parse
from sylvan.protocol.errors import RequestError
from sylvan.runtime.server.native.cloud import VertexBody
from sylvan.runtime.server.routes import ENDPOINTS

MODELS = sorted({e.body for e in ENDPOINTS if e.body} | {VertexBody}, key=lambda m: m.__name__)
MANY = 1_000
MAX_FAULTS = 64
WRONG = [{}, [], None, True, 1.5, -1, "", {"type": "text"}, {"role": 5, "content": [{}, {}]}]
SHAPES = {
    "wrong items": lambda wrong: [wrong] * MANY,
    "wrong items of items": lambda wrong: [[wrong] * MANY] * 2,
    "a list in an object": lambda wrong: [{"role": "user", "content": [wrong] * MANY}] * 2,
    "a map": lambda wrong: {str(i): wrong for i in range(MANY)},
    "a map in a list": lambda wrong: [{str(i): wrong for i in range(MANY)}] * 2,
}


def fields_of(model: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]


def faults_of(model: type[BaseModel], body: Any) -> int:
    try:
        model.model_validate(body)
    except ValidationError as error:
        return error.error_count()
    return 0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("model", MODELS)
def test_faults_of_a_body_are_few(model: type[WireModel], shape: str) -> None:
    for name in fields_of(model):
        for wrong in WRONG:
            assert faults_of(model, {name: SHAPES[shape](wrong)}) <= MAX_FAULTS


@pytest.mark.parametrize("model", MODELS)
def test_faults_in_the_parts_of_a_body_name_a_field(model: type[WireModel]) -> None:
    for name in fields_of(model):
        body = {name: [[{"role": [[]], "type": []}] * MANY]}
        if faults_of(model, body):
            with pytest.raises(RequestError) as error:
                parse(model, body)
            assert error.value.param


def test_an_object_of_too_many_names_is_refused() -> None:
    names = ",".join(f'"{i}":0' for i in range(DEFAULT_LIMITS.names + 1))
    with pytest.raises(
        RequestError, match=f"more than limits.body_names={DEFAULT_LIMITS.names} names"
    ):
        decode_json(f'{{"logit_bias": {{{names}}}}}'.encode())


def test_a_map_without_a_bound_is_no_part_of_a_body() -> None:
    class Unbounded(WireModel):
        names: dict[str, int]

    with pytest.raises(TypeError, match="max_length"):
        parse(Unbounded, {"names": {}})

    fail_fast(BaseModel.__pydantic_core_schema__)


def test_a_map_names_its_first_fault() -> None:
    class Bounded(WireModel):
        names: dict[str, int] = Field(max_length=3)

    with pytest.raises(RequestError) as error:
        parse(Bounded, {"names": {"a": 1, "b": "x", "c": None}})
    assert error.value.param == "names.b"
    with pytest.raises(RequestError, match="at most 3"):
        parse(Bounded, {"names": dict.fromkeys("abcd", "x")})


def test_lists_without_types_are_let_in() -> None:
    class Anything(WireModel):
        items: list[Any]

    assert parse(Anything, {"items": [{}] * MANY}).items == [{}] * MANY

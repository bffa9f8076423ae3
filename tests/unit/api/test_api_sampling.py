"""Sampling parameters from what clients write."""

from __future__ import annotations

import pytest

from sylvan.api.sampling import model_defaults, read_sampling
from sylvan.protocol.errors import RequestError
from sylvan.protocol.sampling import SamplingParams


def test_nothing_given_means_the_defaults():
    assert read_sampling({}, {}) == SamplingParams()


def test_the_request_wins_over_defaults():
    defaults = {"temperature": 0.6, "top_p": 0.9}
    found = read_sampling({"temperature": 0.1, "top_p": None}, defaults)
    assert (found.temperature, found.top_p) == (0.1, 0.9)


def test_one_string_stands_for_a_list():
    found = read_sampling({"stop": "a", "stop_regex": "b+", "stop_token_ids": [1, None]}, {})
    assert (found.stop, found.stop_regex, found.stop_token_ids) == (("a",), ("b+",), (1,))


def test_equal_numbers_are_one_object_and_equal_values_of_other_types_are_not():
    params = {"temperature": 0.5, "n": 2, "max_new_tokens": None}
    assert read_sampling(params, {"top_k": 3}) is read_sampling(dict(params), {"top_k": 3})
    assert read_sampling(params, {"top_k": 4}).top_k == 4
    assert read_sampling({"n": 1}, {}).n == 1
    for wrong in (True, 1.0):
        for _ in range(2):
            with pytest.raises(RequestError) as caught:
                read_sampling({"n": wrong}, {}, "", {"n": "best_of"})
            assert caught.value.param == "best_of"


def test_null_length_means_the_rest_of_the_context():
    assert read_sampling({"max_new_tokens": None}, {}).max_new_tokens is None
    assert read_sampling({}, {}).max_new_tokens == 128


@pytest.mark.parametrize(
    "params",
    [
        {"json_schema": ""},
        {"regex": ""},
        {"ebnf": ""},
        {"structural_tag": ""},
        {"choice": []},
        {"json_schema": "", "regex": "a"},
    ],
)
def test_an_empty_grammar_is_refused(params):
    with pytest.raises(RequestError, match="is empty") as caught:
        read_sampling(params, {})
    assert caught.value.param == f"sampling_params.{next(iter(params))}"


@pytest.mark.parametrize("number", ["1e400", "-1e400", "9" * 400, "NaN", "Infinity"])
def test_a_number_that_no_double_holds_is_named(number):
    with pytest.raises(RequestError, match=f"json_schema is not valid JSON: {number[:20]}"):
        read_sampling({"json_schema": f'{{"maximum": {number}}}'}, {})


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"n": 5_000_000}, "n"),
        ({"top_k": 0}, "top_k"),
        ({"top_p": 0}, "top_p"),
        ({"min_new_tokens": 5, "max_new_tokens": 4}, "min_new_tokens"),
        ({"stop": ["x"] * 33}, "stop"),
        ({"stop_regex": "x" * 300}, "stop_regex[0]"),
        ({"logit_bias": {"a": 1}}, "logit_bias.a"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"logit_bias": {str(i): 0 for i in range(5000)}}, "logit_bias"),
        ({"json_schema": "{"}, "json_schema"),
        ({"json_schema": "[]"}, "json_schema"),
        ({"regex": "a", "ebnf": "b"}, "ebnf"),
        ({"beam_width": 4}, "beam_width"),
        ({"Temperature": 1}, "Temperature"),
    ],
)
def test_bad_values_name_the_field(params, param):
    with pytest.raises(RequestError) as caught:
        read_sampling(params, {})
    assert caught.value.param == f"sampling_params.{param}"


def test_generation_config_gives_defaults():
    config = {"temperature": 0.6, "top_k": 0, "eos_token_id": 3, "top_p": True}
    assert model_defaults(config) == {"temperature": 0.6, "top_k": -1}
    assert model_defaults({"do_sample": False})["temperature"] == 0.0

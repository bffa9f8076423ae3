from __future__ import annotations

import inspect

import pytest

from sylvan import lang as sgl
from sylvan.lang.sampling import NAMES, RUN_NAMES, GenParams, given, run_defaults
from sylvan.protocol.errors import RequestError
from sylvan.protocol.sampling import SamplingParams

SENT_BY_SGLANG = {
    "max_new_tokens": 128, "min_new_tokens": 0, "n": 1, "stop": (), "stop_token_ids": (),
    "stop_regex": (), "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0,
    "frequency_penalty": 0.0, "presence_penalty": 0.0, "ignore_eos": False, "regex": None,
    "json_schema": None,
}  # fmt: skip

# A value that is not the default, for every sampling parameter of the protocol.
OTHER = {
    "max_new_tokens": 7, "min_new_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 40,
    "min_p": 0.1, "frequency_penalty": 0.2, "presence_penalty": 0.3, "repetition_penalty": 1.1,
    "n": 3, "stop": ["x"], "stop_token_ids": [5], "stop_regex": ["y+"], "no_stop_trim": True,
    "ignore_eos": True, "skip_special_tokens": False, "spaces_between_special_tokens": False,
    "json_schema": "{}", "regex": "a", "ebnf": "root ::= 'a'", "structural_tag": "{}",
    "choice": ["a", "b"],
    "logit_bias": {"1": 2.0}, "sampling_seed": 9, "stream_interval": 4,
    "custom_params": {"k": 1}, "strict_grammar": True,
}  # fmt: skip


def test_defaults_are_those_that_sglang_sends():
    assert GenParams().to_wire() == SENT_BY_SGLANG


@pytest.mark.parametrize("name", SamplingParams.__struct_fields__)
def test_no_sampling_parameter_is_dropped_on_the_way(name):
    short = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}

    node = sgl.gen("x", **{short.get(name, name): OTHER[name]})
    params = run_defaults({}).override(node.params, ())

    assert params.to_wire()[name] == OTHER[name]
    wanted = tuple(OTHER[name]) if isinstance(OTHER[name], list) else OTHER[name]
    assert getattr(params.to_protocol(), name) == wanted


def test_signature_of_gen_names_only_known_parameters():
    own = {"name", "choices", "choices_method", "max_tokens", "min_tokens", "sampling"}
    assert set(inspect.signature(sgl.gen).parameters) - own <= NAMES
    assert set(RUN_NAMES) <= NAMES


def test_gen_overrides_run_and_keeps_the_rest():
    defaults = run_defaults({"temperature": 0.3, "stop": "\n", "top_p": 0.5})

    params = defaults.override({"temperature": 0.7, "dtype": None}, ())

    assert (params.temperature, params.top_p, params.stop) == (0.7, 0.5, "\n")


def test_template_stops_come_after_the_programs_own():
    params = run_defaults({}).override({"stop": "\n"}, ("<|im_end|>",))
    assert params.to_wire()["stop"] == ["\n", "<|im_end|>"]
    assert run_defaults({}).override({}, ("<|im_end|>",)).to_wire()["stop"] == ["<|im_end|>"]


@pytest.mark.parametrize(
    ("dtype", "matching", "stops"),
    [
        (int, "-12 \n", [" ", "\n"]),
        ("int", "7", [" ", "\n"]),
        (float, "3.25", [" ", "\n"]),
        (bool, "True", ()),
        (str, '"two words"', ()),
    ],
)
def test_dtype_becomes_a_regex_and_stops(dtype, matching, stops):
    import re

    wire = GenParams(given({"dtype": dtype}, "gen")).to_wire()

    assert re.fullmatch(wire["regex"], matching)
    assert wire["stop"] == stops
    assert "dtype" not in wire


def test_dtype_keeps_a_stop_given_as_string():
    params = GenParams(given({"dtype": int, "stop": "x"}, "gen"))
    assert params.to_wire()["stop"] == ["x", " ", "\n"]


def test_unknown_names_and_values_are_refused_by_name():
    with pytest.raises(TypeError, match=r"temperature_.*did you mean 'temperature'"):
        sgl.gen("x", temperature_=1)
    with pytest.raises(RequestError, match="dtype"):
        sgl.gen("x", dtype=list)
    with pytest.raises(RequestError, match="top_p") as caught:
        run_defaults({"top_p": 2.0})
    assert caught.value.param == "top_p"


def test_logprob_options_stand_beside_the_sampling_parameters():
    params = run_defaults({"return_logprob": True, "top_logprobs_num": 2})
    assert params.logprob_options() == {"return_logprob": True, "top_logprobs_num": 2}
    assert "return_logprob" not in params.to_wire()


def test_unknown_attribute_is_an_error():
    with pytest.raises(AttributeError):
        GenParams().temperature_  # noqa: B018

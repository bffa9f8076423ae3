from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sylvan.protocol.errors import RequestError
from sylvan.protocol.requests import LogprobOptions, RequestOptions
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.tokenizer.checks import (
    CheckedParams,
    CheckedPrompt,
    build_request,
    check_ids,
    check_input,
    check_sampling,
)
from sylvan.runtime.tokenizer.types import GenerateInput, ServedModelInfo

FACTS = ServedModelInfo(
    model_path="m",
    served_name="m",
    context_len=1000,
    vocab_size=50,
    eos_ids=(2, 3),
    max_total_tokens=4096,
)


def build(prompt: Any = (1, 2, 3), facts: ServedModelInfo = FACTS, **fields: Any) -> Any:
    inp = GenerateInput(input_ids=prompt, **fields)
    check_input(inp, facts)
    check_sampling(inp.sampling, facts)
    return build_request(inp, CheckedPrompt(prompt, "input_ids"), facts, seed=77)


def refused(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        build(**fields)
    assert caught.value.status == 400
    return caught.value


def test_open_values_are_filled() -> None:
    request = build(sampling=SamplingParams(max_new_tokens=None))

    assert request.sampling.max_new_tokens == 997
    assert request.sampling.sampling_seed == 77
    assert request.eos_ids == (2, 3)
    assert request.input_ids.dtype == np.int32


def test_given_values_are_kept() -> None:
    sampling = SamplingParams(max_new_tokens=0, sampling_seed=0, ignore_eos=True)

    options = RequestOptions(priority=-5, deadline_s=2.0, ttft_ms=50.0, tpot_ms=5)
    request = build(sampling=sampling, options=options)

    assert request.sampling == sampling
    assert request.eos_ids == ()
    assert (request.priority, request.deadline_s) == (-5, 2.0)
    assert (request.ttft_ms, request.tpot_ms) == (50.0, 5)


def test_memory_bounds_the_rest_of_the_context() -> None:
    facts = ServedModelInfo(
        model_path="m", served_name="m", context_len=100, vocab_size=50, max_total_tokens=64
    )

    assert build(facts=facts, sampling=SamplingParams(max_new_tokens=None)).sampling == (
        SamplingParams(max_new_tokens=61, sampling_seed=77)
    )


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ((), "empty"),
        (range(1000), "1000 tokens"),
        ((1, 50), r"input_ids\[1\] is 50"),
        ((1, -1), r"input_ids\[1\] is -1"),
        ((2**31,), "0 to 49"),
        ((2**70,), "list of token ids"),
        ((1.5, 2), "list of token ids"),
        ((True, False), "list of token ids"),
        (("a",), "list of token ids"),
        ((None,), "list of token ids"),
        (((1, 2), (3, 4)), "list of token ids"),
        (((1,), (2, 3)), "list of token ids"),
    ],
)
def test_prompts_out_of_bounds_are_refused(prompt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        build(prompt=prompt)
    assert caught.value.param == "input_ids"


@pytest.mark.parametrize(
    ("param", "values"),
    [
        ("temperature", [-0.1, math.nan, math.inf, 1e7]),
        ("top_p", [0.0, 1.1, math.nan]),
        ("top_k", [0, -2, 2**31]),
        ("min_p", [-0.1, 1.1, math.nan]),
        ("frequency_penalty", [2.1, -2.1, math.nan, math.inf]),
        ("presence_penalty", [2.1, -2.1, math.nan]),
        ("repetition_penalty", [0.0, 2.1, math.nan]),
        ("n", [0, -1, 129, 5_000_000]),
        ("max_new_tokens", [-1, 998, 10**9, 2**40]),
        ("min_new_tokens", [-1, 129]),
        ("stop", [("",), ("a" * 1025,), ("a",) * 33]),
        ("stop_regex", [("(",), ("a*",), ("a" * 257,)]),
        ("stop_token_ids", [(50,), (-1,), (1,) * 1025]),
        ("logit_bias", [{"50": 1.0}, {"-1": 1.0}, {"x": 1.0}, {"1": 101.0}, {"1": math.nan}]),
        ("sampling_seed", [2**63, -(2**63) - 1]),
        ("stream_interval", [0, 10**7]),
    ],
)
def test_sampling_parameters_out_of_bounds_name_the_field(param: str, values: list[Any]) -> None:
    for value in values:
        error = refused(sampling=SamplingParams(**{param: value}))
        assert error.param == param, (value, str(error))
        assert param in str(error)


def test_two_grammars_exclude_each_other() -> None:
    assert refused(sampling=SamplingParams(regex="a", ebnf="b")).param == "ebnf"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        (LogprobOptions(top=1_000_000), "top_logprobs_num"),
        (LogprobOptions(top=-1), "top_logprobs_num"),
        (LogprobOptions(top=51), "top_logprobs_num"),
        (LogprobOptions(start=4), "logprob_start_len"),
        (LogprobOptions(start=-1), "logprob_start_len"),
        (LogprobOptions(token_ids=(50,)), "token_ids_logprob"),
        (LogprobOptions(token_ids=(1,) * 1025), "token_ids_logprob"),
    ],
)
def test_logprob_options_out_of_bounds_are_refused(options: LogprobOptions, param: str) -> None:
    assert refused(logprobs=options).param == param


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("priority", 2**31),
        ("deadline_s", 0.0),
        ("deadline_s", math.nan),
        ("deadline_s", math.inf),
        ("deadline_s", 86401.0),
        ("ttft_ms", 0.0),
        ("ttft_ms", math.inf),
        ("tpot_ms", -1.0),
        ("tpot_ms", math.nan),
    ],
)
def test_options_out_of_bounds_are_refused(field: str, value: Any) -> None:
    assert refused(options=RequestOptions(**{field: value})).param == field


@pytest.mark.parametrize("rid", ["", "x" * 257])
def test_names_out_of_bounds_are_refused(rid: str) -> None:
    assert refused(rid=rid).param == "rid"


def test_one_of_text_and_ids_is_needed() -> None:
    for inp in (GenerateInput(), GenerateInput(text="a", input_ids=(1,))):
        with pytest.raises(RequestError, match="one of text and input_ids"):
            check_input(inp, FACTS)


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised() -> None:
    with pytest.raises(RequestError, match="1000000 characters"):
        check_input(GenerateInput(text="x" * 1_000_000), FACTS)


def test_ids_are_copied() -> None:
    array = np.arange(3, dtype=np.int32)

    copy = check_ids(array, 50, "input_ids")
    array[0] = 9

    assert copy.tolist() == [0, 1, 2]


def test_checked_parameters_are_known_again_but_not_for_another_model() -> None:
    known, sampling = CheckedParams(), SamplingParams(stop_token_ids=(49,))
    known.check(sampling, FACTS, 4096)
    known.check(sampling, FACTS, 0)  # it is not looked at again
    with pytest.raises(RequestError, match=r"limits\.parameter_bytes"):
        known.check(SamplingParams(stop_token_ids=(49,)), FACTS, 0)
    smaller = replace(FACTS, vocab_size=49)
    with pytest.raises(RequestError, match="0 to 48"):
        known.check(sampling, smaller, 4096)


def test_large_parameters_are_not_kept_and_neither_are_many() -> None:
    known = CheckedParams()
    large = SamplingParams(json_schema='{"a": "' + "x" * 10_000 + '"}')
    known.check(large, FACTS, 1 << 20)
    with pytest.raises(RequestError, match="json_schema"):
        known.check(large, FACTS, 0)
    many = [SamplingParams(n=1, top_k=k + 1) for k in range(1000)]
    for sampling in many:
        known.check(sampling, FACTS, 4096)
    known.check(many[-1], FACTS, 0)
    with pytest.raises(RequestError, match=r"limits\.parameter_bytes"):
        known.check(many[0], FACTS, 0)

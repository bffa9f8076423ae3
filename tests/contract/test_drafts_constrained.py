"""Draft tokens where what may be drawn depends on the tokens before: penalties, grammars, thinking.

Position by position along the draft tokens, all of it is as plain decoding has it.
"""

from __future__ import annotations

import itertools
import time
from contextlib import contextmanager

import numpy as np
import pytest

from sylvan.config.tree import GrammarConfig
from sylvan.kernels.native.library import describe
from sylvan.protocol.requests import LogprobOptions, ThinkingOptions
from sylvan.runtime.executor.build import build_executor
from sylvan.runtime.executor.options import ExecutorParts
from sylvan.runtime.features.grammar.build import build_grammar
from sylvan.runtime.features.grammar.text import vocabulary_of
from sylvan.runtime.features.standard_workers import STANDARD_WORKERS
from sylvan.text.tokenizer import Tokenizer
from tests.parity.serving import Serving
from tests.support.oracle_drafter import OracleDrafter
from tests.support.random_model import VOCAB, write_random_model

SCHEMA = (
    '{"type":"object","properties":{"name":{"type":"string","maxLength":4},"on":{"type":"boolean"}},'
    '"required":["name","on"],"additionalProperties":false}'
)
BUDGET = ThinkingOptions(ends=((261, 10),), budget=4)
ASKED = {
    "frequency": {"frequency_penalty": 0.7, "presence_penalty": 0.3},
    "repetition": {"repetition_penalty": 1.3, "temperature": 1.1, "top_k": 50},
    "bias": {"logit_bias": {"70": 4.0, "71": 4.0}, "frequency_penalty": 1.0},
    "schema": {"json_schema": SCHEMA, "temperature": 1.0},
    "regex": {"regex": "(yes|no), (the answer is [0-9]{3}, ){1,3}done\\.", "temperature": 0.9},
    "penalised regex": {"regex": "[ab]{20,30}", "frequency_penalty": 0.9},
    "budget": {"thinking": BUDGET, "temperature": 1.2},
    "budget and schema": {"thinking": BUDGET, "json_schema": SCHEMA, "temperature": 1.0},
    "min tokens": {"min_new_tokens": 9, "stop_token_ids": list(range(0, 256, 2))},
    "plain": {"temperature": 0.8},
}
RUNNERS = ["eager", pytest.param("program", marks=pytest.mark.skipif(
    describe().variant is None, reason="kernels are not compiled"))]  # fmt: skip


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_random_model(tmp_path_factory.mktemp("model"), context_len=256)


@contextmanager
def serving_of(model_dir, runner, jumps, *capabilities):
    tokenizer = Tokenizer.load(model_dir)
    config = GrammarConfig(backend="llguidance", jump_forward=jumps)
    grammar = build_grammar(config, lambda: vocabulary_of(tokenizer, VOCAB), VOCAB)

    def build(path, options):
        workers = (*STANDARD_WORKERS, lambda context: grammar.worker)
        return build_executor(path, options, parts=ExecutorParts(workers))

    options = {"attention": "reference"} if runner == "eager" else {}
    serving = Serving(
        model_dir,
        runner=runner,
        options=options,
        build=build,
        capabilities=(grammar.control, *capabilities),
        max_running_reqs=16,
    )
    try:
        yield serving
    finally:
        serving.close()
        grammar.close()


def prompt_of(name):
    return [40 + list(ASKED).index(name), 9, 200, 31]


def answers(serving, names, *, logprobs=None):
    rids = {}
    for name in names:
        fields = {"max_new_tokens": 40, "eos_ids": (258,), "sampling_seed": 5, **ASKED[name]}
        rids[name] = serving.add(prompt_of(name), logprobs=logprobs, **fields)
    while not serving.scheduler.idle:
        if not serving.scheduler.step():
            time.sleep(0.001)  # a grammar is being compiled
    assert serving.scheduler.audit() == 0
    assert not [f for r in rids.values() if (f := serving.finish[r]).type == "abort"]
    return {name: serving.tokens[rid] for name, rid in rids.items()}


@pytest.fixture(scope="module")
def expected(model_dir):
    found = {}
    for runner, jumps in itertools.product(("eager", "program"), (False, True)):
        if runner == "program" and describe().variant is None:
            continue
        with serving_of(model_dir, runner, jumps) as serving:
            found[runner, jumps] = {name: answers(serving, [name])[name] for name in ASKED}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("jumps", [False, True], ids=["step by step", "jumping"])
@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("company", ["alone", "together"])
def test_answers_are_those_without_drafts(model_dir, expected, runner, jumps, right, company):
    wanted = expected[runner, jumps]
    tree = runner == "eager" and right == 0.6
    by_prompt = {tuple(prompt_of(name)): wanted[name] for name in ASKED}
    drafter = OracleDrafter(by_prompt, VOCAB, right=right, tree=tree, count=5)
    with serving_of(model_dir, runner, jumps, drafter) as serving:
        groups = [[name] for name in ASKED] if company == "alone" else [list(ASKED)]
        found = {}
        for names in groups:
            found |= answers(serving, names)
        load = serving.scheduler.load()

    assert found == wanted
    assert load.verified_drafts > 40
    assert (load.accepted_draft_tokens > 100) == (right > 0)


@pytest.mark.slow
@pytest.mark.parametrize("runner", RUNNERS)
def test_log_probabilities_are_those_without_drafts(model_dir, expected, runner):
    options = LogprobOptions(top=2)
    with serving_of(model_dir, runner, True) as plain:
        wanted = answers(plain, list(ASKED), logprobs=options)
    by_prompt = {tuple(prompt_of(name)): wanted[name] for name in ASKED}
    drafter = OracleDrafter(by_prompt, VOCAB, right=0.7, count=5)
    with serving_of(model_dir, runner, True, drafter) as serving:
        assert answers(serving, list(ASKED), logprobs=options) == wanted

    for rid, outputs in plain.outputs.items():
        for name in ("logprobs", "top_logprobs"):
            want, got = (
                np.concatenate([getattr(o.logprobs, name) for o in some if o.logprobs])
                for some in (outputs, serving.outputs[rid])
            )
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 if runner == "eager" else 0)

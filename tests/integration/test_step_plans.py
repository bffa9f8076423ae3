"""A plan written by one process drives an executor in another: the same tokens, nothing shared."""

from __future__ import annotations

import re
import time

import numpy as np
import pytest

from sylvan.protocol.errors import ExecutorError
from sylvan.protocol.requests import LogprobOptions
from sylvan.runtime.core.step import STEP_FORMAT, StepPlan
from sylvan.runtime.executor.build import build_executor
from sylvan.runtime.executor.facts import read_facts
from sylvan.runtime.executor.options import ExecutorParts
from sylvan.runtime.features.standard_workers import STANDARD_WORKERS
from tests.parity.serving import Serving, build_standard
from tests.support.grammar import END, build_byte_grammar
from tests.support.random_model import write_random_model
from tests.support.remote_executor import RemoteExecutor, codec

PROMPTS = [[5, 9, 200, 31], [7] * 37, list(range(40, 110)), [5, 9, 200, 31, 8]]
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "frequency_penalty": 0.5, "max_new_tokens": 12}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_random_model(tmp_path_factory.mktemp("model"), context_len=256)


def remote(path, options):
    return RemoteExecutor(path, options), read_facts(path)


@pytest.mark.parametrize("runner", ["eager", "auto"])
def test_another_process_computes_the_same(model_dir, runner):
    here = Serving(model_dir, runner=runner)
    there = Serving(model_dir, runner=runner, build=remote, overlap=True, max_batch_tokens=48)
    try:
        for asked in ({}, SAMPLED):
            assert there.generate(PROMPTS, **asked) == here.generate(PROMPTS, **asked)
        options = LogprobOptions(start=1, top=2)
        rids = {one: one.add(PROMPTS[2], logprobs=options) for one in (here, there)}
        for one in rids:
            one.run()
        found = [one.outputs[rid][0].prompt_logprobs for one, rid in rids.items()]
        assert np.array_equal(found[0].top_ids, found[1].top_ids)
        assert np.allclose(found[0].logprobs, found[1].logprobs, atol=1e-5, equal_nan=True)
    finally:
        there.close()
        here.close()


def test_grammars_cross_as_data(model_dir):
    """Grammars compiled here constrain outputs there, also while requests start and end."""
    grammars = [build_byte_grammar(read_facts(model_dir).vocab_size) for _ in range(2)]
    regexes = ["(ab|cd){4}", "[0-9]{12}", "(ab|cd){4}", "x+y{3}"]
    found = []
    for grammar, build in zip(grammars, (grammar_here(grammars[0]), remote), strict=True):
        serving = Serving(model_dir, build=build, capabilities=(grammar.control,))
        lives = []
        for _ in range(2):  # the second time they are known to the control half only
            rids = [
                serving.add(prompt, regex=regex, max_new_tokens=20, eos_ids=(END,))
                for prompt, regex in zip(PROMPTS, regexes, strict=True)
            ]
            finish(serving, rids)
            lives.append([bytes(t for t in serving.tokens[rid] if t != END) for rid in rids])
        serving.close()
        grammar.close()
        found.append(lives)

    assert found[0] == found[1]
    for texts in found[1]:
        for text, regex in zip(texts, regexes, strict=True):
            assert re.fullmatch(regex, text.decode()) or len(text) == 20


def finish(serving, rids):
    """Grammars are compiled elsewhere, so steps may have nothing to do for a while."""
    end = time.monotonic() + 60
    while not all(rid in serving.finish for rid in rids):
        assert time.monotonic() < end
        if not serving.scheduler.step():
            time.sleep(0.005)


def grammar_here(grammar):
    def build(path, options):
        parts = ExecutorParts((*STANDARD_WORKERS, lambda context: grammar.worker))
        return build_executor(path, options, parts=parts)

    return build


@pytest.mark.slow
def test_a_decoding_step_is_a_few_hundred_bytes(model_dir):
    serving = Serving(model_dir, build=remote)
    serving.generate([[1, 2, 3]], max_new_tokens=2)
    before, steps = serving.executor.sent_bytes, serving.scheduler.load().steps
    serving.generate([[4, 5, 6]], max_new_tokens=65)
    serving.close()

    per_step = (serving.executor.sent_bytes - before) / (serving.scheduler.load().steps - steps)
    assert per_step < 400


def test_a_plan_of_another_format_is_refused(model_dir):
    plan = StepPlan(
        num_slices=0,
        num_tokens=0,
        num_samples=0,
        num_in_flight=0,
        numbers=np.empty(0, np.int32),
        format=STEP_FORMAT + 1,
    )

    with pytest.raises(ExecutorError, match="this version reads"):
        codec().plan(codec().encode(plan))


@pytest.mark.parametrize("data", [b"", b"\x00" * 40, b"\xc1", codec().encode(StepPlan(
    num_slices=1, num_tokens=1, num_samples=1, num_in_flight=0, numbers=np.zeros(6, np.int32),
    work={"unheard_of": 1},
))])  # fmt: skip
def test_malformed_plans_are_refused(data):
    with pytest.raises(ExecutorError, match=r"malformed step|unknown capabilities"):
        codec().plan(data)


def test_plans_survive_the_way_as_they_were(model_dir):
    seen = []

    class Spy:
        def __init__(self, executor) -> None:
            self._executor, self.caps = executor, executor.caps

        def launch(self, plan):
            seen.append(plan)
            return self._executor.launch(codec().plan(codec().encode(plan)))

        def close(self) -> None:
            self._executor.close()

    def spied(path, options):
        executor, facts = build_standard(path, options)
        return Spy(executor), facts

    serving = Serving(model_dir, build=spied)
    assert serving.generate(PROMPTS) == Serving(model_dir).generate(PROMPTS)
    for plan in seen:
        again = codec().plan(codec().encode(plan))
        assert np.array_equal(again.numbers, plan.numbers)
        assert again.work.keys() == plan.work.keys()
        assert np.array_equal(again.pages, plan.pages)

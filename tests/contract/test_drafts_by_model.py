"""A model that writes ahead: the bits of plain decoding, and all memory comes back."""

from __future__ import annotations

import itertools
import random

import pytest

from sylvan.kernels.native.library import describe
from sylvan.protocol.requests import ThinkingOptions
from sylvan.runtime.executor.options import LocalOptions
from sylvan.runtime.features.speculation.depth import LONGEST_PAUSE
from sylvan.runtime.features.speculation.draft_model import DraftModel
from sylvan.runtime.features.speculation.model_control import ModelSpeculation
from sylvan.runtime.sched.limits import SchedulerLimits
from tests.parity.serving import Serving, build_standard
from tests.support.random_model import VOCAB, write_random_model

pytestmark = pytest.mark.skipif(describe().variant is None, reason="kernels are not compiled")

PROMPTS = [[5, 9, 200, 31], [7] * 17, list(range(40, 60)), [5, 9, 200, 31, 8]]
WAYS = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "top_p": 0.9, "top_k": 40},
    "penalised": {"temperature": 1.2, "frequency_penalty": 0.8, "repetition_penalty": 1.1},
    "biased": {"logit_bias": {"70": 3.0}, "min_new_tokens": 5},
    "thinking": {"thinking": ThinkingOptions(ends=((261, 10),), budget=6)},
}


class Ticks:
    """A clock on which everything takes as long as a test says."""

    def __init__(self, seed: int = 1) -> None:
        self._times = itertools.accumulate(iter(random.Random(seed).random, None))

    def __call__(self) -> float:
        return next(self._times)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_random_model(tmp_path_factory.mktemp("model"), context_len=128)


def draft_model(model_dir, *, pages=200, context_len=128, load_format="auto", seed=0):
    options = LocalOptions(
        page_size=16,
        num_pages=pages + 1,
        max_batch_tokens=256,
        max_running_reqs=8,
        load_format=load_format,
        seed=seed,
    )
    executor, _ = build_standard(model_dir, options)
    limits = SchedulerLimits(max_batch_tokens=256, max_running_reqs=8)
    return DraftModel(executor, limits=limits, context_len=context_len)


def speculating(model_dir, model, *, adaptive=False, limit=4, clock=None, **options):
    speculation = ModelSpeculation(model, limit, VOCAB, adaptive=adaptive, clock=clock or Ticks())
    return Serving(model_dir, runner="program", capabilities=(speculation,), **options), speculation


@pytest.fixture(scope="module")
def expected(model_dir):
    serving = Serving(model_dir, runner="program")
    return {way: serving.generate(PROMPTS, max_new_tokens=24, **ask) for way, ask in WAYS.items()}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("twin", [True, False], ids=["itself", "a stranger"])
def test_tokens_are_those_without(model_dir, expected, way, twin):
    model = draft_model(model_dir, load_format="auto" if twin else "dummy", seed=5)
    serving, speculation = speculating(model_dir, model)
    found = serving.generate(PROMPTS, max_new_tokens=24, **WAYS[way])
    load = serving.scheduler.load()

    assert found == expected[way]
    assert speculation.counts.failures == 0
    assert load.verified_drafts > 12
    if twin and way in ("greedy", "sampled", "penalised"):
        assert load.accept_rate == 1.0, "it draws what the model itself draws"
    if not twin and way != "biased":  # towards the same token
        assert load.accept_rate < 0.5
    assert serving.scheduler.audit() == model._scheduler.audit() == 0
    model.close()


def test_what_the_model_has_read_is_not_read_again(model_dir):
    model = draft_model(model_dir)
    serving, _ = speculating(model_dir, model)
    serving.generate([list(range(30, 90))], max_new_tokens=30)

    load = model._scheduler.load()
    assert load.computed_tokens < 60 + 2 * 30
    assert load.cached_prompt_tokens > 60


def test_little_memory_and_long_texts_cost_speed_only(model_dir, expected):
    for changed in ({"pages": 3}, {"context_len": 20}):
        model = draft_model(model_dir, **changed)
        serving, speculation = speculating(model_dir, model, pages=9)
        found = serving.generate(PROMPTS, max_new_tokens=24)

        assert found == expected["greedy"]
        assert speculation.counts.failures == 0
        assert model._scheduler.audit() == 0


class Broken:
    """Raises, says nonsense, or nothing."""

    def __init__(self, what) -> None:
        self.what = what

    def write(self, counts):
        if self.what == "raises":
            raise RuntimeError("the device is gone")
        nonsense = {"strangers": (VOCAB, 1), "too many": (1,) * 9, "nothing": ()}[self.what]
        return dict.fromkeys(counts, nonsense)


@pytest.mark.parametrize("what", ["raises", "strangers", "too many", "nothing"])
def test_a_model_that_fails_costs_speed_only(model_dir, expected, what):
    serving, speculation = speculating(model_dir, Broken(what))

    assert serving.generate(PROMPTS, max_new_tokens=24) == expected["greedy"]
    assert (speculation.counts.failures > 5) == (what != "nothing")
    assert serving.scheduler.load().verified_drafts == 0


class Measured:
    """A model whose every draft token takes so long, on a clock of the test."""

    def __init__(self, model, draft_s) -> None:
        self.now = 0.0
        self._model, self._draft_s = model, draft_s

    def write(self, counts):
        self.now += max(counts.values()) * self._draft_s
        return self._model.write(counts)


@pytest.mark.parametrize(
    ("twin", "draft_s", "pays"), [(True, 0.1, True), (True, 1.5, False), (False, 0.1, False)]
)
def test_it_writes_as_far_as_that_pays(model_dir, twin, draft_s, pays):
    """A step takes a second, whatever its rows."""
    model = draft_model(model_dir, load_format="auto" if twin else "dummy", seed=5)
    measured = Measured(model, draft_s)
    serving, speculation = speculating(
        model_dir, measured, adaptive=True, clock=lambda: measured.now
    )
    launch = serving.executor.launch

    def timed(plan):
        measured.now += 1.0
        return launch(plan)

    serving.executor.launch = timed
    serving.generate([PROMPTS[0]], max_new_tokens=100)
    load = serving.scheduler.load()

    if pays:
        assert load.accepted_draft_tokens > 50
        assert load.steps < 50
    else:
        assert load.verified_drafts < 12
        assert speculation.counts.looks < 30
        assert 8 < speculation._pauses._pause <= LONGEST_PAUSE


def test_chunks_retraction_and_the_cache_go_together_with_it(model_dir, expected):
    model = draft_model(model_dir)
    serving, _ = speculating(
        model_dir,
        model,
        pages=7,
        chunk_tokens=8,
        max_batch_tokens=48,
        conservativeness=0.0,
    )
    for _ in range(2):
        found = serving.generate(PROMPTS, max_new_tokens=24, **WAYS["sampled"])
        assert found == expected["sampled"]

    load = serving.scheduler.load()
    assert load.retractions > 0
    assert load.cached_prompt_tokens > 0
    assert serving.scheduler.audit() == 0

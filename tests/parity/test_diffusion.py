"""Models that fill blocks write what their published schedule writes, in every mode."""

from __future__ import annotations

import numpy as np
import pytest

from sylvan.config.diffusion import DiffusionConfig
from sylvan.protocol.errors import ConfigError
from sylvan.protocol.requests import GenerateRequest
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.executor.facts import check_tensors
from sylvan.runtime.features.diffusion.worker import FillSchedule, chosen
from sylvan.runtime.models.registry import load_config
from tests.parity.blocks import NEW, Blocks, compare_blocks, prompts
from tests.parity.published_blocks import FILLING, WHOLE, filling, written, written_whole


@pytest.mark.parametrize("runner", ["eager", "auto"])
@pytest.mark.parametrize(
    "name",
    [
        n if n in ("sdar", "llada") else pytest.param(n, marks=pytest.mark.slow)
        for n in (*FILLING, *WHOLE)
    ],
)
def test_blocks_are_filled_as_published(name, runner, tmp_path):
    found = compare_blocks(name, tmp_path, runner)
    config = load_config(tmp_path)

    assert not found.modes
    assert config.path == "native"
    assert check_tensors(config, tmp_path)


def test_requests_bring_their_own_schedule_and_stop_within_a_block(tmp_path):
    model = filling("sdar", tmp_path)
    prompt = prompts()[0]
    serving = Blocks(tmp_path, runner="auto")
    schedules = {"few": (1, 1.0), "many": (4, 1.0), "sure": (4, 0.0)}

    found = {}
    for name, (steps, confidence) in schedules.items():
        serving.scheduler.add(_request(name, prompt, denoising_steps=steps, confidence=confidence))
    serving.run()
    for name, (steps, confidence) in schedules.items():
        found[name] = serving.tokens[name]
        expected, _ = written(model, prompt, NEW, steps=steps, confidence=confidence)
        assert found[name] == expected, name
    assert found["few"] == found["sure"]  # all places in one pass
    assert found["few"] != found["many"]

    stop = found["many"][5]
    [short] = Blocks(tmp_path, DiffusionConfig(confidence=1.0)).generate(
        [prompt], max_new_tokens=NEW, stop_token_ids=(stop,)
    )
    assert short == found["many"][: found["many"].index(stop) + 1]


def _request(rid, prompt, **options):
    return GenerateRequest(
        rid=rid,
        input_ids=np.array(prompt, np.int32),
        output_ids=np.empty(0, np.int32),
        sampling=SamplingParams(temperature=0.0, max_new_tokens=NEW, sampling_seed=1),
        **options,
    )


def test_sampled_answers_do_not_depend_on_company(tmp_path):
    filling("sdar", tmp_path)
    how = {"max_new_tokens": NEW, "temperature": 0.9, "top_p": 0.9}
    serving = Blocks(tmp_path, runner="auto")

    together = serving.generate(prompts(), **how)
    alone = [Blocks(tmp_path, runner="auto").generate([p], **how)[0] for p in prompts()]

    assert together == alone
    assert together != serving.generate(prompts(), **how | {"sampling_seed": 2})


@pytest.mark.parametrize(
    ("option", "param"),
    [({"repetition_penalty": 1.2}, "repetition_penalty"), ({"presence_penalty": 1.0}, "presence")],
)
def test_what_needs_an_order_is_refused(option, param, tmp_path):
    filling("sdar", tmp_path)
    serving = Blocks(tmp_path)
    bad, good = serving.add(prompts()[0], **option), serving.add(prompts()[1])
    serving.run()

    assert serving.finish[bad].type == "abort"
    assert serving.finish[bad].status == 400
    assert param in serving.finish[bad].message
    assert serving.finish[good].type == "length"


def test_a_whole_answer_is_filled_in_the_order_asked_for(tmp_path):
    model = filling("dream", tmp_path)
    [prompt] = prompts()[1:2]
    found = {}
    for order in ("probability", "entropy", "margin"):
        serving = Blocks(tmp_path, DiffusionConfig(steps=8, confidence=1.0, order=order))
        [found[order]] = serving.generate([prompt], max_new_tokens=16)

    assert found["probability"] == written_whole(model, prompt, 16, steps=8, block=512)
    assert len({tuple(tokens) for tokens in found.values()}) > 1
    sure = Blocks(tmp_path, DiffusionConfig(confidence=0.0)).generate([prompt], max_new_tokens=16)
    assert sure == [written_whole(model, prompt, 16, steps=1, block=512)]


def test_texts_that_do_not_fit_into_a_pass_are_refused(tmp_path):
    filling("llada", tmp_path)
    serving = Blocks(tmp_path, max_batch_tokens=64)
    long = serving.add(prompts()[0], max_new_tokens=25)
    short = serving.add(prompts()[0], max_new_tokens=24)
    serving.run()

    assert serving.finish[long].status == 400
    assert "at most 64 tokens (scheduler.max_batch_tokens); these are 65" in (
        serving.finish[long].message
    )
    assert serving.finish[short].type == "length"


def test_times_say_how_many_places_a_pass_fills():
    """As published: the whole number of places for which the time has come, the rest at last."""
    schedule, left, found = FillSchedule(4, 1.0, 1e-3), 24, []
    for step in range(4):
        found.append(schedule.timed_quota(24, left, step))
        left -= found[-1]

    assert found == [5, 6, 6, 7]


def test_steps_hold_a_block(tmp_path):
    filling("sdar", tmp_path)

    with pytest.raises(ConfigError, match="max_batch_tokens=7"):
        Blocks(tmp_path, max_batch_tokens=7)


def test_the_most_certain_places_go_first():
    chances = np.array([0.3, 0.9, 0.5, 0.9, 0.1], np.float32)

    assert chosen(chances, 1, 0.8).tolist() == [1, 3]
    assert chosen(chances, 3, 0.8).tolist() == [1, 2, 3]
    assert chosen(chances, 1, 1.0).tolist() == [1]
    assert chosen(chances, 1, 1.0, -chances).tolist() == [4]
    assert [FillSchedule(3, 0.5).quota(8, step) for step in range(4)] == [3, 3, 2, 2]

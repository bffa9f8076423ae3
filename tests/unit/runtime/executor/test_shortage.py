"""A step that does not fit into memory is computed again in smaller ones; no request is lost."""

from __future__ import annotations

import pytest
import torch

from tests.parity.serving import Serving
from tests.support.delayed import DelayedPlatform
from tests.support.on_device import OnDevice
from tests.support.random_model import write_random_model

PROMPTS = [[5, 9, 200, 31], [7] * 37, list(range(40, 90))]
ASKED = {"max_new_tokens": 10, "frequency_penalty": 0.3}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_random_model(tmp_path_factory.mktemp("model"), context_len=128)


def model_of(executor):
    backend = executor._worker._backend
    return (backend._runner if backend.immediate else backend._parts.runner)._model


def starve(executor, *, when) -> list[int]:
    """Let the model's forward pass run out of memory; returns the rows of passes that did."""
    model, failed, passes = model_of(executor), [], [0]
    embed = model.embed

    def hungry(batch):
        passes[0] += 1
        if when(passes[0], batch.num_tokens):
            failed.append(batch.num_tokens)
            raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")
        return embed(batch)

    model.embed = hungry
    return failed


@pytest.mark.parametrize("path", ["host", "host overlapped", "device", "device overlapped"])
@pytest.mark.parametrize("at", [1, 4])
def test_requests_survive_a_step_that_does_not_fit(model_dir, path, at):
    expected = Serving(model_dir).generate(PROMPTS, **ASKED)
    platform = DelayedPlatform()
    build = {"build": OnDevice(platform, graph=False)} if path.startswith("device") else {}
    serving = Serving(model_dir, overlap="overlapped" in path, **build)
    failed = starve(serving.executor, when=lambda count, rows: count == at)

    assert serving.generate(PROMPTS, **ASKED) == expected
    serving.close()

    assert len(failed) == 1
    assert serving.scheduler.load().retractions >= len(PROMPTS) - 1
    assert serving.scheduler.audit() == 0


def test_steps_become_as_small_as_needed_and_large_again(model_dir):
    serving = Serving(model_dir)
    failed = starve(serving.executor, when=lambda count, rows: rows > 12)

    serving.generate(PROMPTS, max_new_tokens=70)

    assert failed[0] == sum(map(len, PROMPTS))
    assert failed[1] == failed[0] // 2
    assert serving.scheduler._planner.step_size.tokens > 12


def test_what_never_fits_fails_alone_with_the_reason(model_dir):
    serving = Serving(model_dir)
    starve(serving.executor, when=lambda count, rows: count < 40)
    rid = serving.add([1, 2, 3], max_new_tokens=2)
    serving.run()

    assert serving.finish[rid].type == "abort"
    assert "2.00 GiB" in serving.finish[rid].message


def test_prompts_that_are_never_split_fail_at_once(model_dir):
    serving = Serving(model_dir, whole_prompts=True)
    failed = starve(serving.executor, when=lambda count, rows: True)
    rid = serving.add([1, 2, 3], max_new_tokens=2)
    serving.run()

    assert serving.finish[rid].type == "abort"
    assert len(failed) == 1

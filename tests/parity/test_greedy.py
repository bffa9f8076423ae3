"""Greedy tokens equal those of transformers in every mode (fp32, tiny random checkpoints)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from sylvan.kernels.native.library import describe
from sylvan.protocol.requests import LogprobOptions
from tests.parity.checkpoints import FAMILIES, VOCAB, greedy, make
from tests.parity.serving import Serving

NEW = 64
TOLERANCE = 2e-5  # of log probabilities of order 5, both sides in fp32


RUNNERS = ["eager"]
if describe().variant is not None:
    RUNNERS.append("program")


@pytest.fixture(params=RUNNERS)
def runner(request) -> str:
    return request.param


@dataclass(frozen=True)
class Oracle:
    """A checkpoint, prompts, and what transformers makes of them."""

    path: Path
    prompts: list[list[int]]
    expected: list[list[int]]
    logprobs: list[np.ndarray]  # of each prompt: (len, V)


@pytest.fixture(scope="module", params=FAMILIES)
def oracle(request, tmp_path_factory) -> Oracle:
    path = tmp_path_factory.mktemp(request.param)
    model = make(request.param, path)
    rng = np.random.default_rng(7)
    prompts = [rng.integers(4, VOCAB, n).tolist() for n in (40, 3, 17, 61)]
    expected, logprobs = [], []
    with torch.inference_mode():
        for prompt in prompts:
            expected.append(greedy(model, prompt, NEW))
            logprobs.append(model(torch.tensor([prompt])).logits[0].log_softmax(-1).numpy())
    return Oracle(path, prompts, expected, logprobs)


def test_alone_equals_transformers(oracle, runner):
    serving = Serving(oracle.path, runner=runner)

    found = [serving.generate([prompt], max_new_tokens=NEW)[0] for prompt in oracle.prompts]

    assert found == oracle.expected


def test_logits_equal_transformers(oracle, runner):
    serving = Serving(oracle.path, runner=runner)

    everything = LogprobOptions(start=0, token_ids=tuple(range(VOCAB)))
    rids = [serving.add(p, logprobs=everything, max_new_tokens=1) for p in oracle.prompts]
    serving.run()

    for rid, prompt, expected in zip(rids, oracle.prompts, oracle.logprobs, strict=True):
        (out,) = serving.outputs[rid]
        assert out.prompt_logprobs.token_ids.tolist() == prompt
        found = np.concatenate(
            [out.prompt_logprobs.chosen_logprobs[1:], out.logprobs.chosen_logprobs]
        )
        assert np.abs(found - expected).max() < TOLERANCE


@pytest.mark.parametrize("overlap", [False, True])
def test_batched_equals_transformers(oracle, runner, overlap):
    serving = Serving(oracle.path, runner=runner, overlap=overlap)

    assert serving.generate(oracle.prompts, max_new_tokens=NEW) == oracle.expected
    serving.close()


def test_chunked_equals_transformers(oracle, runner):
    serving = Serving(oracle.path, runner=runner, chunk_tokens=16, max_batch_tokens=19)

    assert serving.generate(oracle.prompts, max_new_tokens=NEW) == oracle.expected


def test_cached_equals_transformers(oracle, runner):
    serving = Serving(oracle.path, runner=runner)
    serving.generate(oracle.prompts, max_new_tokens=NEW)
    computed = serving.scheduler.load().computed_tokens

    again = serving.generate(oracle.prompts, max_new_tokens=NEW)

    assert again == oracle.expected
    assert serving.scheduler.load().computed_tokens < 2 * computed - 60, "the cache was not used"


@pytest.mark.parametrize("overlap", [False, True])
def test_preempted_equals_transformers(oracle, runner, overlap):
    serving = Serving(oracle.path, runner=runner, pages=18, overlap=overlap, conservativeness=0.1)

    assert serving.generate(oracle.prompts, max_new_tokens=NEW) == oracle.expected
    assert serving.scheduler.load().retractions > 0, "nothing was preempted"
    serving.close()


def test_replayed_equals_transformers(oracle, runner):
    serving = Serving(oracle.path, runner=runner)

    rids = [
        serving.add(prompt, outputs=tokens[:20], max_new_tokens=NEW)
        for prompt, tokens in zip(oracle.prompts, oracle.expected, strict=True)
    ]
    serving.run()

    assert [serving.tokens[rid] for rid in rids] == [tokens[20:] for tokens in oracle.expected]

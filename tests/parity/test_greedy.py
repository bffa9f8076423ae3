"""Greedy tokens equal those of transformers in every mode (fp32, tiny random checkpoints)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from sylvan.kernels.native.library import describe
from sylvan.protocol.requests import LogprobOptions
from tests.parity.checkpoints import FAMILIES, VOCAB, greedy, make
from tests.parity.compare import greedy_up_to_rounding
from tests.parity.rounding import Exact
from tests.parity.serving import Serving

NEW = 64


RUNNERS = ["eager"]
if describe().variant is not None:
    RUNNERS.append("program")


@pytest.fixture(params=RUNNERS)
def runner(request) -> str:
    return request.param


@dataclass(frozen=True)
class Oracle:
    """A checkpoint, prompts, and what transformers makes of them.

    `rows` are log probabilities after each token of prompt and answer, (len, V); `explained` is by
    what float32 may miss them, (len,).
    """

    path: Path
    prompts: list[list[int]]
    expected: list[list[int]]
    rows: list[np.ndarray]
    explained: list[np.ndarray]

    def is_greedy(self, answers: list[list[int]], start: int = 0) -> bool:
        """Whether these are the answers of transformers from token `start` on.

        Where two tokens are as likely as each other, but for rounding, either is.
        """
        return all(
            len(answer) == NEW - start
            and greedy_up_to_rounding(
                answer,
                expected[start:],
                rows[len(prompt) - 1 + start : -1],
                2 * explained[len(prompt) - 1 + start : -1],
            )
            for prompt, answer, expected, rows, explained in zip(
                self.prompts, answers, self.expected, self.rows, self.explained, strict=True
            )
        )


@pytest.fixture(scope="module", params=FAMILIES)
def oracle(request, tmp_path_factory) -> Oracle:
    path = tmp_path_factory.mktemp(request.param)
    model = make(request.param, path)
    rng = np.random.default_rng(7)
    prompts = [rng.integers(4, VOCAB, n).tolist() for n in (40, 3, 17, 61)]
    expected = [greedy(model, prompt, NEW) for prompt in prompts]
    exact = Exact(model)
    found = [exact.rows(p + answer) for p, answer in zip(prompts, expected, strict=True)]
    rows, explained = (list(part) for part in zip(*found, strict=True))
    return Oracle(path, prompts, expected, rows, explained)


def test_alone_equals_transformers(oracle, runner):
    serving = Serving(oracle.path, runner=runner)

    found = [serving.generate([prompt], max_new_tokens=NEW)[0] for prompt in oracle.prompts]

    assert oracle.is_greedy(found)


def test_logits_equal_transformers(oracle, runner):
    serving = Serving(oracle.path, runner=runner)

    everything = LogprobOptions(start=0, token_ids=tuple(range(VOCAB)))
    rids = [serving.add(p, logprobs=everything, max_new_tokens=1) for p in oracle.prompts]
    serving.run()

    for rid, prompt, rows, explained in zip(
        rids, oracle.prompts, oracle.rows, oracle.explained, strict=True
    ):
        (out,) = serving.outputs[rid]
        assert out.prompt_logprobs.token_ids.tolist() == prompt
        found = np.concatenate(
            [out.prompt_logprobs.chosen_logprobs[1:], out.logprobs.chosen_logprobs]
        )
        assert len(found) == len(prompt)
        assert (np.abs(found - rows[: len(found)]).max(1) <= explained[: len(found)]).all()


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_batched_equals_transformers(oracle, runner, overlap):
    serving = Serving(oracle.path, runner=runner, overlap=overlap)

    assert oracle.is_greedy(serving.generate(oracle.prompts, max_new_tokens=NEW))
    serving.close()


def test_chunked_equals_transformers(oracle, runner):
    serving = Serving(oracle.path, runner=runner, chunk_tokens=16, max_batch_tokens=19)

    assert oracle.is_greedy(serving.generate(oracle.prompts, max_new_tokens=NEW))


@pytest.mark.slow
def test_cached_equals_transformers(oracle, runner):
    serving = Serving(oracle.path, runner=runner)
    serving.generate(oracle.prompts, max_new_tokens=NEW)
    computed = serving.scheduler.load().computed_tokens

    again = serving.generate(oracle.prompts, max_new_tokens=NEW)

    assert oracle.is_greedy(again)
    assert serving.scheduler.load().computed_tokens < 2 * computed - 60, "the cache was not used"


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_preempted_equals_transformers(oracle, runner, overlap):
    serving = Serving(
        oracle.path,
        runner=runner,
        pages=18,
        overlap=overlap,
        conservativeness=0.1,
        preempt_every=23,
    )

    assert oracle.is_greedy(serving.generate(oracle.prompts, max_new_tokens=NEW))
    assert serving.scheduler.load().retractions > 0, "nothing was preempted"
    serving.close()


def test_replayed_equals_transformers(oracle, runner):
    serving = Serving(oracle.path, runner=runner)

    rids = [
        serving.add(prompt, outputs=tokens[:20], max_new_tokens=NEW)
        for prompt, tokens in zip(oracle.prompts, oracle.expected, strict=True)
    ]
    serving.run()

    assert oracle.is_greedy([serving.tokens[rid] for rid in rids], start=20)

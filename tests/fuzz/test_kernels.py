"""For all valid requests, kernels compute the same in a batch as alone."""

from __future__ import annotations

from random import Random

import pytest

from sylvan.runtime.engine.engine import Engine
from tests.support.random_model import VOCAB, write_random_model

CONTEXT = 96
REQUESTS = 40


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = write_random_model(tmp_path_factory.mktemp("model"), context_len=CONTEXT)
    made = Engine(
        model=str(folder),
        threads=1,
        deterministic=True,
        seed=1,
        cache__max_tokens=4096,
        scheduler__max_batch_tokens=64,
    )
    yield made
    made.shutdown()


def sampling(random: Random, room: int, n: int) -> dict[str, object]:
    """Valid parameters, most of them at an end of their range."""
    ids = [0, VOCAB - 1, random.randrange(VOCAB)]
    extremes: dict[str, list[object]] = {
        "temperature": [0.0, 1e-6, 1.0, 2.0],
        "top_p": [1e-9, 0.5, 1.0],
        "top_k": [-1, 1, VOCAB - 1, 10**6],
        "min_p": [0.0, 1.0],
        "frequency_penalty": [-2.0, 0.0, 2.0],
        "presence_penalty": [-2.0, 2.0],
        "repetition_penalty": [0.01, 1.0, 2.0],
        "stop_token_ids": [ids],
        "logit_bias": [{str(i): random.choice((-100.0, 100.0)) for i in ids}],
        "ignore_eos": [True, False],
        "min_new_tokens": [0, 1],
    }
    chosen = random.sample(sorted(extremes), random.randrange(1, 7))
    found = {name: random.choice(extremes[name]) for name in chosen}
    return {**found, "max_new_tokens": random.randrange(1, room + 1), "n": n, "sampling_seed": 5}


def requests(seed: int, n: int) -> list[tuple[list[int], dict[str, object]]]:
    random, found = Random(seed), []
    for _ in range(REQUESTS):
        length = random.choice((1, 3, 4, 5, 63, 64, 65, CONTEXT - 1))
        ids = [random.choice((0, VOCAB - 1, random.randrange(VOCAB))) for _ in range(length)]
        found.append((ids, sampling(random, min(8, CONTEXT - length), n)))
    return found


def outputs(answers):
    return [answer["output_ids"] for answer in answers]


@pytest.mark.parametrize("n", [1, 3])
def test_extreme_requests_say_the_same_in_a_batch_as_alone(engine, n):
    given = requests(n, n)
    ids, params = [i for i, _ in given], [p for _, p in given]

    together = outputs(engine.generate(input_ids=ids, sampling_params=params))

    apart = []
    for prompt, sampling_params in given:
        answer = engine.generate(input_ids=prompt, sampling_params=sampling_params)
        apart += outputs(answer if isinstance(answer, list) else [answer])
    assert together == apart

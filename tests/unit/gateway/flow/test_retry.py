from __future__ import annotations

import random

from sylvan.config.route import RetryConfig
from sylvan.gateway.flow.retry import Retries, RetryBudget, backoff_s


def test_pauses_grow_to_a_bound_with_jitter():
    config = RetryConfig(initial_backoff_ms=50, multiplier=1.5, max_backoff_ms=400, jitter=0.2)
    rng = random.Random(1)

    for tries, base in ((1, 50), (2, 75), (3, 112.5), (10, 400), (10_000, 400)):
        pauses = [backoff_s(config, tries, rng) * 1000 for _ in range(200)]
        assert base * 0.8 <= min(pauses) < max(pauses) <= base * 1.2


def test_tries_end():
    retries = Retries(RetryConfig(max_tries=3), RetryBudget(1.0), random.Random(1))

    pauses = [retries.next_pause_s() for _ in range(3)]

    assert [pause is None for pause in pauses] == [False, False, True]


def test_one_try_is_no_retry():
    retries = Retries(RetryConfig(max_tries=1), RetryBudget(1.0), random.Random(1))

    assert retries.next_pause_s() is None


def test_a_storm_of_failures_does_not_multiply_the_load():
    config, budget, rng = RetryConfig(max_tries=5), RetryBudget(0.2), random.Random(1)
    attempts = 0
    for _ in range(1000):
        retries = Retries(config, budget, rng)
        attempts += 1
        while retries.next_pause_s() is not None:
            attempts += 1

    assert attempts <= 1000 * 1.2 + 10

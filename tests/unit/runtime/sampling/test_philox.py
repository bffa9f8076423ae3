from __future__ import annotations

import numpy as np
import pytest

from sylvan.runtime.sampling.philox import philox4x32, uniform

# Counter, key, result: the known-answer vectors of Random123 (philox4x32, 10 rounds).
KNOWN = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def words(text: str) -> np.ndarray:
    return np.array([int(word, 16) for word in text.split()], np.uint64)


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_known_answers(counter, key, result):
    assert philox4x32(words(counter)[:, None], words(key)[:, None])[:, 0].tolist() == list(
        words(result)
    )


def test_many_at_once_equal_one_by_one():
    counters = np.stack([words(k[0]) for k in KNOWN], 1)
    keys = np.stack([words(k[1]) for k in KNOWN], 1)

    assert philox4x32(counters, keys).T.tolist() == [words(k[2]).tolist() for k in KNOWN]


def test_numbers_lie_in_the_unit_interval_and_spread():
    n = 20_000
    u = uniform(np.full(n, -5), np.zeros(n, np.int64), np.arange(n))

    assert 0 <= u.min() < 0.001
    assert 0.999 < u.max() < 1
    assert abs(u.mean() - 0.5) < 4 * (1 / 12 / n) ** 0.5


@pytest.mark.parametrize("change", ["seed", "high seed", "sample", "position"])
def test_each_part_of_the_key_matters(change):
    seed, sample, position = np.array([3]), np.array([0]), np.array([9])
    before = uniform(seed, sample, position)

    seed = seed + {"seed": 1, "high seed": 1 << 40}.get(change, 0)
    after = uniform(seed, sample + (change == "sample"), position + (change == "position"))

    assert before != after

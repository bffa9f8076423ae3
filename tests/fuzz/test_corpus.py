"""Inputs that fuzzing found stay fixed, and a short fuzzing run finds nothing new.

`make fuzz` fuzzes for as long as one likes.
"""

from __future__ import annotations

from random import Random

import pytest

from tests.fuzz.run import corpus_of, try_bounded
from tests.fuzz.shapes import mutate
from tests.fuzz.targets import TARGETS

INPUTS = 25  # of each target; the same in every run


@pytest.mark.parametrize("name", TARGETS)
def test_inputs_that_once_found_something_find_nothing(name):
    target = TARGETS[name]
    for file in corpus_of(target):
        assert try_bounded(target, file.read_bytes()) is None, file


@pytest.mark.parametrize("name", TARGETS)
def test_mutated_inputs_find_nothing(name):
    target, random = TARGETS[name], Random(1)
    seeds = list(target.seeds())
    assert seeds
    for data in [*seeds, *(mutate(random.choice(seeds), random, seeds) for _ in range(INPUTS))]:
        assert try_bounded(target, data) is None, data[:200]

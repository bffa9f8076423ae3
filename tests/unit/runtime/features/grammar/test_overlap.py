"""When masks are filled beside the forward pass: decided by what was measured."""

from __future__ import annotations

import pytest

from sylvan.runtime.features.grammar.overlap import LOOK_AGAIN, MARGIN, MIN_S, Overlap


def measured(*, mask_s: float, pass_s: float, free_core: bool) -> Overlap:
    overlap = Overlap(free_core=free_core)
    for _ in range(30):
        overlap.filled(1, mask_s)
    overlap.passed(pass_s)
    return overlap


@pytest.mark.parametrize(
    ("mask_s", "pass_s", "shared", "free"),
    [
        (60e-6, 350e-6, False, False),  # a tiny model: handing over takes longer
        (60e-6, 40e-3, False, False),
        (MIN_S * 1.1, MIN_S * 1.1, False, True),
        (MIN_S * 1.1, MIN_S * 0.9, False, False),  # no longer pass, no gain
        (2e-3, 2.4e-3, False, True),
        (2e-3, MARGIN * 2.1e-3, True, True),
        (30e-3, 40e-3, False, True),
    ],
)
def test_there_must_be_something_to_gain(mask_s, pass_s, shared, free) -> None:
    assert measured(mask_s=mask_s, pass_s=pass_s, free_core=False).beside(1) is shared
    assert measured(mask_s=mask_s, pass_s=pass_s, free_core=True).beside(1) is free


def test_masks_of_a_batch_add_up() -> None:
    overlap = measured(mask_s=60e-6, pass_s=40e-3, free_core=False)

    assert not overlap.beside(1)
    assert overlap.beside(32)
    assert not overlap.beside(320)  # as much as the pass


def test_the_shortest_of_the_last_passes_counts() -> None:
    overlap = measured(mask_s=2e-3, pass_s=40e-3, free_core=False)
    overlap.passed(1e-3)
    assert not overlap.beside(1)
    for _ in range(8):
        overlap.passed(40e-3)

    assert overlap.beside(1)


def test_nothing_is_known_at_first() -> None:
    overlap = Overlap(free_core=True)

    assert not overlap.beside(32)
    overlap.filled(32, 1.0)
    assert not overlap.beside(32)


def test_masks_are_measured_again_now_and_then() -> None:
    overlap = measured(mask_s=2e-3, pass_s=40e-3, free_core=True)
    choices = [overlap.beside(1) for _ in range(LOOK_AGAIN + 1)]
    for _ in range(30):
        overlap.filled(1, 1e-6)

    assert choices == [True] * LOOK_AGAIN + [False]
    assert not overlap.beside(1)

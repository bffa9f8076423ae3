"""Whether drafting pays off, judged by times and tokens of steps."""

from __future__ import annotations

import pytest

from sylvan.runtime.features.speculation.balance import (
    LONGEST_REST,
    PROBE,
    PROBE_EVERY,
    REST,
    WINDOW,
    Balance,
    Balances,
)


class Steps:
    """Steps of one request: a plain one takes a second, one with drafts a given time."""

    def __init__(self):
        self.balance, self.number = Balance(), 0
        self.drafted = []

    def run(self, count, *, drafting_s, right, plain_s=1.0):
        for _ in range(count):
            self.number += 1
            self.drafted.append(self.number >= self.balance.until)
            if self.drafted[-1]:
                self.balance.record_accepted(right)
                self.balance.record_drafting(drafting_s, self.number)
            else:
                self.balance.record_plain(plain_s)

    def stretches(self):
        """Lengths of the stretches without draft tokens, in order."""
        text = "".join("g" if drafted else "." for drafted in self.drafted)
        return [len(part) for part in text.split("g") if part]


def test_where_it_wins_all_steps_draft_but_those_that_measure_plain_ones():
    steps = Steps()
    steps.run(20 * PROBE_EVERY, drafting_s=1.5, right=2.0)

    assert set(steps.stretches()) == {PROBE}
    assert steps.drafted.count(False) / len(steps.drafted) < 0.03


def test_where_it_loses_it_rests_longer_and_longer():
    steps = Steps()
    steps.balance.record_plain(1.0)
    steps.run(5 * LONGEST_REST, drafting_s=1.2, right=0.1)

    assert steps.stretches()[:4] == [REST, 2 * REST, 4 * REST, 8 * REST]
    assert max(steps.stretches()) <= LONGEST_REST
    lost = 0.1 * steps.drafted.count(True) / len(steps.drafted)
    assert lost < 0.01


def test_once_it_wins_again_it_stays():
    steps = Steps()
    steps.balance.record_plain(1.0)
    steps.run(8 * REST, drafting_s=1.2, right=0.1)
    steps.drafted.clear()
    steps.run(3 * LONGEST_REST, drafting_s=1.2, right=1.5)

    assert steps.drafted[-LONGEST_REST:].count(True) > 0.95 * LONGEST_REST


def test_one_step_that_was_held_up_is_no_loss():
    steps = Steps()
    steps.balance.record_plain(1.0)
    steps.run(10, drafting_s=1.1, right=0.3)
    steps.run(1, drafting_s=1000.0, right=0.3)
    steps.run(PROBE_EVERY, drafting_s=1.1, right=0.3)

    assert set(steps.stretches()) <= {PROBE}


def test_plain_steps_are_measured_first():
    steps = Steps()
    steps.run(WINDOW, drafting_s=50.0, right=0.0)

    assert steps.drafted[: 2 + PROBE] == [True, *[False] * PROBE, True]
    assert steps.drafted[2 + PROBE :].count(False) == 0, "no window is full"


@pytest.mark.parametrize(("few", "many"), [(1, 2), (4, 32), (31, 32)])
def test_batches_of_other_sizes_are_judged_apart(few, many):
    balances = Balances()
    assert balances.of(few) is not balances.of(many)
    assert balances.of(2**40) is balances.of(2**50)

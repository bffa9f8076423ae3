"""How many draft tokens are verified, from measured acceptance and measured steps."""

from __future__ import annotations

import random

import pytest

from sylvan.runtime.features.speculation.acceptance import Acceptance, record_chain
from sylvan.runtime.features.speculation.api import GRADES
from sylvan.runtime.features.speculation.cost import RECENT, REMEMBERED, StepCosts
from sylvan.runtime.features.speculation.policy import Throughput


def costs_of(seconds, rows=[*range(1, 100)] * RECENT):
    costs = StepCosts()
    for count in rows:
        costs.record(count, seconds(count))
    return costs


def acceptance_of(share, tries=200):
    found, rng = Acceptance(), random.Random(1)
    for grade in range(GRADES):
        for _ in range(tries):
            found.record(grade, right=rng.random() < share)
    return found


def test_shares_of_right_drafts_are_learnt_by_grade():
    found, rng = Acceptance(), random.Random(3)
    for _ in range(3000):
        grade = rng.choice([1, 7])
        found.record(grade, right=rng.random() < (0.2 if grade == 1 else 0.9))

    assert found.chance(1) == pytest.approx(0.2, abs=0.06)
    assert found.chance(7) == pytest.approx(0.9, abs=0.06)
    assert found.chance(2) == pytest.approx(found.chance(1), abs=0.06), "what is next to it"


def test_a_request_starts_from_what_all_tell_and_learns_its_own():
    every = acceptance_of(0.9)
    own = Acceptance(every)
    assert own.chance(3) == every.chance(3)
    for _ in range(30):
        own.record(3, right=False)

    assert own.chance(3) < 0.15
    assert Acceptance(every).chance(3) > 0.7


def test_what_is_expected_of_a_chain_ends_where_a_draft_is_wrong():
    found = acceptance_of(0.5, tries=500)

    assert found.expected(2, 3) == pytest.approx([1, 1.5, 1.75, 1.875], abs=0.1)


def test_drafts_behind_a_wrong_one_say_nothing():
    found = Acceptance()
    record_chain(found, range(2, 6), drafts=(5, 6, 7, 8), actual=(5, 9, 7, 8))

    assert found._right[:5] == [0, 0, 1, 0, 0]
    assert found._tried[:5] == [0, 0, 1, 1, 0]
    assert found._tried[4] == found._tried[5] == 0


def test_steps_between_measured_ones_lie_on_a_line_and_never_fall():
    costs = costs_of(lambda rows: {1: 1.0, 5: 1.4, 9: 1.3}[rows], rows=[9, 1, 5] * RECENT)

    assert costs.seconds(1) == 1.0
    assert 1.3 < costs.seconds(5) < 1.45
    assert costs.seconds(3) == pytest.approx((1.0 + costs.seconds(5)) / 2)
    assert costs.seconds(9) >= costs.seconds(5)
    assert costs.seconds(10) > costs.seconds(9)


def test_a_step_that_was_held_up_is_not_believed_until_most_are():
    costs = costs_of(lambda _: 1.0, rows=[1] * RECENT)
    for _ in range(RECENT // 2):
        costs.record(1, 50.0)
    assert costs.seconds(1) == 1.0
    for _ in range(RECENT // 2):
        costs.record(1, 50.0)

    assert costs.seconds(1) == 50.0


def test_the_first_step_with_drafts_may_be_held_up():
    costs = costs_of(lambda _: 1.0, rows=[1] * RECENT)
    costs.record(5, 3.0)

    assert costs.seconds(5) < 2
    assert Throughput(costs).count("a", range(3, 7), acceptance_of(0.9)) == 4


def test_a_few_rows_that_were_held_up_once_do_not_make_more_rows_dear():
    costs = costs_of(lambda rows: 1.0 + 0.02 * rows, rows=[1, 3, 4, 5] * RECENT)
    costs.record(2, 30.0)

    assert costs.seconds(5) < 1.6
    for _ in range(3):
        costs.record(2, 1.0)
    assert costs.seconds(2) <= costs.seconds(3) < 1.2


def test_what_was_not_measured_for_long_is_forgotten():
    costs = costs_of(lambda rows: 1.0 if rows < 5 else 100.0, rows=[1, 5])
    for _ in range(REMEMBERED):
        costs.record(1, 1.0)

    assert costs.seconds(5) < 1.5


def test_free_rows_are_used_and_dear_ones_are_not():
    free, dear = costs_of(lambda _: 1.0), costs_of(lambda rows: 1.0 * rows)
    good = acceptance_of(0.8)

    assert Throughput(free).count("a", range(3, 11), good) == 8
    assert Throughput(dear).count("a", range(3, 11), good) == 0
    assert Throughput(free).count("a", range(3, 11), acceptance_of(0.0)) == 0


def test_nothing_is_verified_before_a_step_was_measured():
    assert Throughput(StepCosts()).count("a", range(3, 11), acceptance_of(1.0)) == 0


def test_the_length_is_that_of_most_tokens_a_second():
    chance, slope = 0.7, 0.2
    costs = costs_of(lambda rows: 1.0 + slope * (rows - 1))
    acceptance = acceptance_of(chance, tries=500)
    rates = [
        tokens / costs.seconds(1 + count) for count, tokens in enumerate(acceptance.expected(1, 12))
    ]

    assert Throughput(costs).count("a", range(1, 13), acceptance) == rates.index(max(rates))
    assert 0 < rates.index(max(rates)) < 12


def test_requests_share_what_the_batch_can_take():
    """Up to 8 rows a step takes as long as one row, then each row as long as a step."""
    costs = costs_of(lambda rows: float(max(1, rows - 7)))
    policy, good = Throughput(costs), acceptance_of(0.9)
    policy.launched({str(i): 1 for i in range(4)})
    counts = [policy.count(str(i), range(3, 9), good) for i in range(4)]

    assert 4 + sum(counts) == 8
    policy.launched({str(i): 1 + count for i, count in enumerate(counts)})
    assert sum(policy.count(str(i), range(3, 9), good) for i in range(4)) == 4


def test_requests_that_are_gone_do_not_count():
    costs = costs_of(lambda rows: float(max(1, rows - 7)))
    policy, good = Throughput(costs), acceptance_of(0.9)
    policy.launched({str(i): 1 for i in range(8)})
    assert policy.count("0", range(3, 9), good) == 0
    policy.launched({"0": 1})

    assert policy.count("0", range(3, 9), good) == 6

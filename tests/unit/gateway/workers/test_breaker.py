from __future__ import annotations

import pytest

from sylvan.config.route import BreakerConfig
from sylvan.gateway.workers.breaker import BreakerState, CircuitBreaker
from sylvan.utils.clock import VirtualClock

CONFIG = BreakerConfig(failures=3, successes=2, open_s=60, window_s=120)


@pytest.fixture
def clock():
    return VirtualClock(1000.0)


@pytest.fixture
def breaker(clock):
    return CircuitBreaker(CONFIG, clock)


def fail(breaker, times):
    for _ in range(times):
        breaker.sent()
        breaker.failed()


def test_failures_in_a_row_open_it(breaker):
    fail(breaker, 2)
    assert breaker.allows

    fail(breaker, 1)

    assert breaker.state is BreakerState.OPEN
    assert not breaker.allows


def test_a_success_between_failures_keeps_it_closed(breaker):
    fail(breaker, 2)
    breaker.succeeded()
    fail(breaker, 2)

    assert breaker.state is BreakerState.CLOSED


def test_failures_far_apart_are_not_in_a_row(breaker, clock):
    fail(breaker, 2)
    clock.advance(121)
    fail(breaker, 2)

    assert breaker.state is BreakerState.CLOSED


def test_it_lets_as_many_try_as_must_succeed(breaker, clock):
    fail(breaker, 3)
    clock.advance(60)

    assert breaker.state is BreakerState.HALF_OPEN
    breaker.sent()
    assert breaker.allows
    breaker.sent()
    assert not breaker.allows


def test_successes_close_it_again(breaker, clock):
    fail(breaker, 3)
    clock.advance(60)
    for _ in range(2):
        assert breaker.allows
        breaker.sent()
        breaker.succeeded()

    assert breaker.state is BreakerState.CLOSED


def test_one_failure_of_a_trial_reopens_it(breaker, clock):
    fail(breaker, 3)
    clock.advance(60)
    assert breaker.allows
    fail(breaker, 1)

    assert breaker.state is BreakerState.OPEN
    clock.advance(59)
    assert not breaker.allows
    clock.advance(1)
    assert breaker.allows


def test_trials_without_a_verdict_make_room_for_others(breaker, clock):
    fail(breaker, 3)
    clock.advance(60)
    for _ in range(5):
        assert breaker.allows
        breaker.sent()
        breaker.abandoned()

    assert breaker.state is BreakerState.HALF_OPEN


def test_listeners_are_called_on_changes(breaker, clock):
    seen = []
    breaker.on_change.append(lambda old, new: seen.append((old.value, new.value)))
    fail(breaker, 3)
    clock.advance(60)
    for _ in range(2):
        assert breaker.allows
        breaker.sent()
        breaker.succeeded()

    assert seen == [("closed", "open"), ("open", "half_open"), ("half_open", "closed")]


def test_turned_off_it_never_opens(clock):
    breaker = CircuitBreaker(BreakerConfig(enabled=False, failures=1), clock)
    fail(breaker, 100)

    assert breaker.allows

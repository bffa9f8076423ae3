from __future__ import annotations

from sylvan.runtime.engine.restart import Backoff, RestartPolicy
from sylvan.utils.clock import VirtualClock

POLICY = RestartPolicy(max_restarts=4, window_s=60.0, base_delay_s=0.5)


def test_restarts_wait_longer_each_time_and_end() -> None:
    backoff = Backoff(POLICY, VirtualClock())

    assert [backoff.next_delay_s() for _ in range(5)] == [0.0, 2.0, 4.0, 8.0, None]


def test_old_restarts_do_not_count() -> None:
    clock = VirtualClock()
    backoff = Backoff(POLICY, clock)
    for _ in range(POLICY.max_restarts):
        backoff.next_delay_s()
    assert backoff.next_delay_s() is None

    clock.advance(POLICY.window_s + 1)

    assert backoff.next_delay_s() == 0.0


def test_no_restart_at_all() -> None:
    assert Backoff(RestartPolicy(max_restarts=0), VirtualClock()).next_delay_s() is None

from __future__ import annotations

from sylvan.runtime.engine.life import MAX_RESTARTS, WINDOW_S, Backoff
from sylvan.utils.clock import VirtualClock


def test_restarts_wait_longer_each_time_and_end() -> None:
    delays = [(backoff := Backoff(VirtualClock())).next_delay_s()]
    delays += [backoff.next_delay_s() for _ in range(MAX_RESTARTS)]

    assert delays[0] == 0.0
    assert delays[-1] is None
    waited = [d for d in delays if d is not None]
    assert waited == sorted(set(waited))


def test_old_restarts_are_forgiven() -> None:
    clock = VirtualClock()
    backoff = Backoff(clock)
    for _ in range(MAX_RESTARTS):
        backoff.next_delay_s()
    assert backoff.next_delay_s() is None

    clock.advance(WINDOW_S + 1)

    assert backoff.next_delay_s() == 0.0

"""The watchdog judges processes only by time in which its own process ran."""

from __future__ import annotations

from sylvan.runtime.engine.watchdog import Watchdog
from sylvan.utils.clock import VirtualClock

LIMIT_S = 300.0


class Fixture:
    def __init__(self) -> None:
        self.clock = VirtualClock(1000.0)
        self.watchdog = Watchdog(LIMIT_S, self.clock)

    def check(self, heartbeat_s: float | None) -> bool:
        """The next check, one interval after the last."""
        self.clock.advance(self.watchdog.interval_s)
        return self.watchdog.hangs(heartbeat_s)

    def checks_until_hang(self, heartbeat_s: float) -> int:
        for count in range(1, 100):
            if self.check(heartbeat_s):
                return count
        raise AssertionError("it was never told to hang")


def test_a_process_without_heartbeats_hangs_after_the_limit() -> None:
    fix = Fixture()
    count = fix.checks_until_hang(heartbeat_s=fix.clock())

    assert LIMIT_S < count * fix.watchdog.interval_s <= LIMIT_S + fix.watchdog.interval_s


def test_a_process_with_heartbeats_does_not_hang() -> None:
    fix = Fixture()
    assert not any(fix.check(fix.clock()) for _ in range(100))


def test_a_process_that_starts_is_not_judged_however_long_it_takes() -> None:
    fix = Fixture()
    assert not any(fix.check(None) for _ in range(100))
    assert not fix.check(fix.clock())


def test_after_a_suspension_of_all_processes_old_heartbeats_are_not_judged() -> None:
    fix = Fixture()
    heartbeat_s = fix.clock()
    fix.check(heartbeat_s)

    fix.clock.advance(3600.0)  # nothing ran

    # no new heartbeat has been read at this check and the next
    assert not fix.check(heartbeat_s)
    assert not fix.check(heartbeat_s)


def test_a_process_that_does_not_come_back_from_a_suspension_hangs_after_the_limit() -> None:
    fix = Fixture()
    heartbeat_s = fix.clock()
    fix.check(heartbeat_s)
    fix.clock.advance(3600.0)

    count = fix.checks_until_hang(heartbeat_s)

    passed = (count - 1) * fix.watchdog.interval_s  # since the first check after it
    assert LIMIT_S < passed <= LIMIT_S + fix.watchdog.interval_s


def test_a_check_that_is_a_little_late_judges_as_ever() -> None:
    fix = Fixture()
    heartbeat_s = fix.clock()
    for _ in range(12):
        fix.clock.advance(0.9 * fix.watchdog.interval_s)
        hangs = fix.check(heartbeat_s)
    assert hangs

"""A long start says how far it has come."""

from __future__ import annotations

import logging

from sylvan.runtime.engine.progress import (
    LOG_INTERVAL_S,
    REPORT_INTERVAL_S,
    LoggedProgress,
    ReportedProgress,
    logger,
)


def test_loading_is_reported_periodically(caplog):
    now = 0.0
    progress = LoggedProgress("w4a8", clock=lambda: now)

    with caplog.at_level(logging.INFO):
        for step in range(1, 9):
            now = step * LOG_INTERVAL_S / 2
            progress(step << 20, 8 << 20)

    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "loading weights as w4a8: 2 MiB of 8 MiB (25 %)"
    assert lines[-1].endswith("8 MiB of 8 MiB (100 %)")
    assert len(lines) == 4


def test_the_end_of_loading_is_always_reported(caplog):
    progress = LoggedProgress(clock=lambda: 0.0)

    with caplog.at_level(logging.INFO):
        progress(1 << 10, 2 << 10)
        progress(2 << 10, 2 << 10)

    # the collector may log what earlier tests left behind
    lines = [record.getMessage() for record in caplog.records if record.name == logger.name]
    assert lines == ["loading weights: 2 KiB of 2 KiB (100 %)"]


def test_the_parent_gets_progress_at_a_bounded_rate_and_the_end():
    now, told = 0.0, []
    progress = ReportedProgress(told.append, clock=lambda: now)

    for step in range(1, 101):
        now = step * REPORT_INTERVAL_S / 10
        progress(step, 100)

    found = [message.done for message in told]
    assert (found[0], found[-1]) == (1, 100)
    assert 9 <= len(found) <= 12

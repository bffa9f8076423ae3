"""A long start says how far it has come."""

from __future__ import annotations

import logging

from sylvan.runtime.engine.build import PROGRESS_S, LoggedProgress


def test_loading_is_told_now_and_then(caplog):
    now = 0.0
    progress = LoggedProgress("w4a8", clock=lambda: now)

    with caplog.at_level(logging.INFO):
        for step in range(1, 9):
            now = step * PROGRESS_S / 2
            progress(step << 20, 8 << 20)

    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "loading weights as w4a8: 2 of 8 MiB (25 %)"
    assert lines[-1].endswith("8 of 8 MiB (100 %)")
    assert len(lines) == 4

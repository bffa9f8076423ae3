"""Children that wait for their orders."""

from __future__ import annotations

import subprocess
from contextlib import closing

from sylvan.runtime.engine.process import DETOKENIZER, EarlyScheduler, start_process


def test_an_early_scheduler_that_nobody_takes_ends() -> None:
    with closing(EarlyScheduler()) as early:
        process = early.take()
        assert process is not None
        assert early.take() is None
        assert process.poll() is None
    assert process.poll() is None  # whoever takes it ends it
    process.kill()
    process.communicate()

    with closing(EarlyScheduler()) as early:
        early.close()
        assert early.take() is None


def test_an_early_scheduler_ends_with_the_statement() -> None:
    seen: list[subprocess.Popen[bytes]] = []

    class Watched(EarlyScheduler):
        def take(self) -> subprocess.Popen[bytes] | None:
            process = super().take()
            if process is not None:
                seen.append(process)
            return process

    with closing(Watched()):
        assert not seen
    assert [p.returncode for p in seen] == [-9]


def test_a_child_without_orders_says_nothing_and_ends(capfd) -> None:
    process = start_process(DETOKENIZER)
    process.communicate(b"")

    assert process.returncode == 1
    assert capfd.readouterr() == ("", "")

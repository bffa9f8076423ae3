"""Children that wait for their configuration."""

from __future__ import annotations

import subprocess
from contextlib import closing

from sylvan.config.env import for_compute
from sylvan.runtime.engine.process import DETOKENIZER_ARGV, PrewarmedScheduler, start_process


def test_a_prewarmed_scheduler_that_is_not_used_ends() -> None:
    with closing(PrewarmedScheduler()) as prewarmed:
        process = prewarmed.take()
        assert process is not None
        assert prewarmed.take() is None
        assert process.poll() is None
    assert process.poll() is None  # whoever takes it ends it
    process.kill()
    process.communicate()

    with closing(PrewarmedScheduler()) as prewarmed:
        prewarmed.close()
        assert prewarmed.take() is None


def test_a_prewarmed_scheduler_ends_with_the_statement() -> None:
    seen: list[subprocess.Popen[bytes]] = []

    class Watched(PrewarmedScheduler):
        def take(self) -> subprocess.Popen[bytes] | None:
            process = super().take()
            if process is not None:
                seen.append(process)
            return process

    with closing(Watched()):
        assert not seen
    assert [p.returncode for p in seen] == [-9]


def test_a_child_without_a_configuration_says_nothing_and_ends(capfd) -> None:
    process = start_process(DETOKENIZER_ARGV, for_compute())
    process.communicate(b"")

    assert process.returncode == 1
    assert capfd.readouterr() == ("", "")

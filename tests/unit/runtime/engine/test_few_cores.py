"""Ranks that share too few cores."""

from __future__ import annotations

import pytest

from sylvan.config.tree import Config, ParallelConfig
from sylvan.runtime.engine.build import warn_of_few_cores


@pytest.mark.parametrize(
    ("parallel", "cores", "wanted"),
    [
        (ParallelConfig(tp=4), 7, "4 ranks with threads=2: 8 threads on 7 cores"),
        (ParallelConfig(tp=2, pp=3), 8, "6 ranks with threads=2: 12 threads on 8 cores"),
        (ParallelConfig(tp=4, nodes=2), 3, "2 ranks with threads=2: 4 threads on 3 cores"),
        (ParallelConfig(tp=4), 8, ""),
        (ParallelConfig(tp=4, nodes=2), 4, ""),
    ],
)
def test_more_threads_than_cores_are_warned_of_with_the_way_out(
    caplog: pytest.LogCaptureFixture, parallel: ParallelConfig, cores: int, wanted: str
) -> None:
    warn_of_few_cores(Config(threads=2, parallel=parallel), cores)

    way_out = "reduce parallel.tp, parallel.pp or threads"
    assert wanted in caplog.text
    assert bool(wanted) == bool(caplog.text) == (way_out in caplog.text)

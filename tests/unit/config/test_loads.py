"""Loads and bounds of latency: one syntax for load tests and simulations."""

from __future__ import annotations

import pytest

from sylvan.config.bench import LoadConfig
from sylvan.config.objectives import bounds
from sylvan.config.simulate import ArrivalConfig
from sylvan.config.sweep import loads
from sylvan.protocol.errors import ConfigError

KINDS = pytest.mark.parametrize("kind", [LoadConfig, ArrivalConfig])


def test_bounds_are_read_as_milliseconds():
    assert bounds("sim.slo", {"ttft": "500", "tpot": "2.5", "e2e": "1e4"}) == {
        "ttft": 0.5,
        "tpot": 0.0025,
        "e2e": 10.0,
    }


@pytest.mark.parametrize(
    "given", [{"ttfd": "5"}, {"ttft": "0"}, {"ttft": "soon"}, {"tpot": "-1"}, {"e2e": "inf"}]
)
def test_bounds_that_mean_nothing_are_refused(given):
    with pytest.raises(ConfigError, match=r"^result\.goodput: .* for ttft, tpot, e2e, got \w+="):
        bounds("result.goodput", given)


@KINDS
def test_a_sweep_is_several_loads(kind):
    found = loads(kind(burstiness=2.0, sweep=("1", "32", "2.5/s")))

    assert [(each.concurrency, each.rate) for each in found] == [(1, None), (32, None), (None, 2.5)]
    assert {each.burstiness for each in found} == {2.0}
    assert loads(kind(rate=3.0)) == [kind(rate=3.0)]


@KINDS
@pytest.mark.parametrize("word", ["0", "x", "1.5", "-2/s", "inf/s", "3/m"])
def test_a_sweep_that_means_nothing_is_refused(kind, word):
    with pytest.raises(ConfigError, match=r"load\.sweep: expected 8 .* got"):
        loads(kind(sweep=(word,)))

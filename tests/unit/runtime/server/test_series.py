"""Counters and histograms of requests: exported as by prometheus_client's own."""

from __future__ import annotations

import prometheus_client
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from sylvan.runtime.server.observe.series import CounterFamily, GaugeFamily, HistogramFamily

BOUNDS = (0.001, 0.5, 1, 20, 1_000_000)
AMOUNTS = st.lists(st.sampled_from([0.0, 0.001, 0.25, 0.5, 0.75, 1.0, 19.5, 20.0, 1e6, 1e9]))


def page(registry):
    lines = prometheus_client.generate_latest(registry).decode().splitlines()
    return [line for line in lines if "_created" not in line]  # the times of their making


@given(amounts=AMOUNTS, others=AMOUNTS)
def test_histograms_are_exported_as_by_the_library(amounts, others):
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    mine = HistogramFamily("h_seconds", "Help", BOUNDS, ["model", "kind"], ours)
    library = Histogram("h_seconds", "Help", ["model", "kind"], buckets=BOUNDS, registry=theirs)
    for label, observed in (("a", amounts), ("b", others)):
        for family in (mine, library):
            series = family.labels("m", label)
            for amount in observed:
                series.observe(amount)
    assert page(ours) == page(theirs)


def test_a_value_is_observed_several_times_at_once():
    together, apart = CollectorRegistry(), CollectorRegistry()
    HistogramFamily("h", "Help", BOUNDS, [], together).labels().observe(0.75, 3)
    series = HistogramFamily("h", "Help", BOUNDS, [], apart).labels()
    for _ in range(3):
        series.observe(0.75)
    assert page(together) == page(apart)


@given(amounts=AMOUNTS)
def test_counters_and_gauges_are_exported_as_by_the_library(amounts):
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    mine = CounterFamily("c_tokens", "Help", ["model"], ours)
    library = Counter("c_tokens", "Help", ["model"], registry=theirs)
    gauge = GaugeFamily("g", "Help", ["model"], ours).labels("m")
    library_gauge = Gauge("g", "Help", ["model"], registry=theirs).labels("m")
    for family in (mine, library):
        family.labels('with "quotes"\n')
        for amount in amounts:
            family.labels("m").inc(amount)
    for each in (gauge, library_gauge):
        each.inc(2)
        each.inc(-1)
    assert sorted(page(ours)) == sorted(page(theirs))

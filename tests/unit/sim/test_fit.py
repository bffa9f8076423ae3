"""A fit finds the costs that made a recording; a replica takes the recorded steps again."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest

from sylvan.config.route import RoutingConfig
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.features.flight_recorder.recording import read as read_recording
from sylvan.sim.cost import NoisyStepTimes
from sylvan.sim.features import PlanShape, segments, shape
from sylvan.sim.fit import fit, nonnegative
from sylvan.sim.fleet import Fleet
from sylvan.sim.measured import errors, measured
from sylvan.sim.observed import TimedShape, observe
from sylvan.sim.profile import read, write
from sylvan.sim.replay import follow
from sylvan.sim.request_fit import fit_request_cost
from tests.support.simulated import HOST, STEP, profile, record, workload

STILL = msgspec.structs.replace(STEP, decode_scatter=(), prompt_scatter=())
STILL_HOST = msgspec.structs.replace(HOST, scatter=())


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("still")
    record(folder, workload(150, rate=25.0), step=STILL, host=STILL_HOST)
    return folder


def test_a_fit_finds_the_times_of_steps(recorded):
    found = fit(observe(str(recorded)))
    was, fitted = (NoisyStepTimes(step, HOST, None) for step in (STILL, found.step))

    for timed in observe(str(recorded)).steps:
        assert fitted.mean_s(timed.shape) == pytest.approx(was.mean_s(timed.shape), rel=0.02)
    larger = PlanShape(4 * found.origin.max_rows, 8, 8, 0, 0.0, 0)  # extrapolated
    assert fitted.mean_s(larger) == pytest.approx(was.mean_s(larger), rel=0.2)
    assert found.origin.step_error < 0.01
    host, true = found.host, STILL_HOST
    for slices, starts in ((1, 0), (4, 1), (8, 0)):
        wanted = true.constant + slices * true.slice + starts * true.start
        got = host.constant + slices * host.slice + starts * host.start
        assert got == pytest.approx(wanted, rel=0.05)


def test_scatter_keeps_the_mean_and_the_quantiles(tmp_path):
    record(tmp_path, workload(300, rate=25.0))
    found = fit(observe(str(tmp_path)))
    was, fitted = (NoisyStepTimes(step, HOST, [1]) for step in (STEP, found.step))
    small, large = PlanShape(3, 3, 3, 200, 0.0, 0), PlanShape(50, 2, 2, 60, 1300.0, 1)

    for shape_ in (small, large):
        wanted, got = (np.array([t.step_s(shape_) for _ in range(4000)]) for t in (was, fitted))
        assert got.mean() == pytest.approx(wanted.mean(), rel=0.05)
        assert np.percentile(got, 95) == pytest.approx(np.percentile(wanted, 95), rel=0.08)


def test_a_replica_fed_with_recorded_times_takes_the_recorded_steps(recorded, tmp_path):
    followed = follow(recorded / "run-1")

    assert followed.difference == ""
    assert (followed.steps, followed.requests) == (len(_steps(recorded)), 150)

    setup = json.loads((recorded / "run-1" / "setup.json").read_text())
    changed = tmp_path / "run-1"
    changed.mkdir()
    setup["limits"]["chunk_tokens"] = 16
    (changed / "setup.json").write_text(json.dumps(setup))
    (changed / "events.msgpack").write_bytes((recorded / "run-1" / "events.msgpack").read_bytes())
    assert "planned" in follow(changed).difference


def _steps(folder):
    _, events = read_recording(folder / "run-1")
    return [event for event in events if getattr(event, "method", "") == "step"]


def test_times_outside_the_scheduler_are_what_clients_saw_more(recorded, tmp_path):
    observed = observe(str(recorded))
    base = fit(observed)
    base = msgspec.structs.replace(base, request=profile().request)
    outcomes = Fleet(base, RoutingConfig(policy="round_robin"), 1, seed=9).run(
        workload(150, rate=25.0)
    )
    line = {
        "input_lens": outcomes.prompt, "output_lens": outcomes.output,
        "sent": outcomes.sent_s, "ttfts": outcomes.ttft_s.tolist(),
        "latencies": outcomes.latency_s.tolist(), "errors": [""] * 150, "model": "m",
    }  # fmt: skip
    file = tmp_path / "runs.jsonl"
    file.write_text("{}\n" + json.dumps(line) + "\n")

    found = fit_request_cost(fit(observed), measured(str(file)), observed, str(file))

    assert found.request.constant == pytest.approx(base.request.constant, abs=3e-4)
    assert (found.origin.model, found.origin.results) == ("m", str(file))


def test_the_spread_of_the_way_back_is_measured(recorded, tmp_path):
    """Clients that saw every first token by so much later than another, by a clock of their own."""
    observed, rng = observe(str(recorded)), np.random.default_rng(3)
    way_back_s = 0.002 + rng.exponential(0.004, len(observed.requests))
    sent = np.array([added for added, _ in observed.requests]) - 0.0005
    first = np.array([observed.first_s[request.rid] for _, request in observed.requests])
    assert len(observed.first_s) == len(observed.requests)
    line = {
        "input_lens": [len(request.input_ids) for _, request in observed.requests],
        "output_lens": [request.sampling.max_new_tokens for _, request in observed.requests],
        "sent": (sent + 77.0).tolist(), "ttfts": (first + way_back_s - sent).tolist(),
        "latencies": [1.0] * len(sent), "errors": [""] * len(sent),
    }  # fmt: skip
    file = tmp_path / "runs.jsonl"
    file.write_text(json.dumps(line))

    spread = fit_request_cost(
        fit(observed), measured(str(file)), observed, str(file)
    ).request.spread

    assert len(spread) > 100
    shares = np.linspace(0, 99.9, len(spread))
    wanted = np.percentile(way_back_s, shares) - np.median(way_back_s)
    assert np.allclose(spread, wanted, atol=1e-7)


def test_results_of_another_server_are_refused(recorded, tmp_path):
    line = {
        "input_lens": [7] * 20, "output_lens": [3] * 20, "sent": [0.0] * 20, "ttfts": [0.1] * 20,
        "latencies": [0.2] * 20, "errors": [""] * 20,
    }  # fmt: skip
    file = tmp_path / "runs.jsonl"
    file.write_text(json.dumps(line))
    observed = observe(str(recorded))

    with pytest.raises(ConfigError, match="--results: 0 of 20 requests are in"):
        fit_request_cost(fit(observed), measured(str(file)), observed, str(file))
    file.write_text(json.dumps({**line, "sent": [0.0]}))
    with pytest.raises(ConfigError, match="different lengths"):
        measured(str(file))
    file.write_text(json.dumps({"input_lens": [1]}))
    with pytest.raises(ConfigError, match=r"output_lens.*--output-details"):
        measured(str(file))
    with pytest.raises(ConfigError, match="cannot read the results"):
        measured(str(tmp_path / "none"))


def test_errors_are_relative():
    assert errors({"median_ttft_ms": 11.0}, {"median_ttft_ms": 10.0}) == {
        "median_ttft_ms": pytest.approx(0.1)
    }
    assert errors({"median_ttft_ms": 11.0}, {"median_ttft_ms": 0.0}) == {}


def test_too_short_a_recording_is_refused(tmp_path):
    record(tmp_path, workload(1))

    with pytest.raises(ConfigError, match="a fit needs at least 50"):
        fit(observe(str(tmp_path)))
    with pytest.raises(ConfigError, match="holds no recording"):
        observe(str(tmp_path / "none"))


def test_several_lives_are_distinguished(tmp_path):
    for _ in range(2):
        record(tmp_path, workload(3))

    with pytest.raises(ConfigError, match=r"several runs; give one of .*run-1, .*run-2"):
        observe(str(tmp_path))
    assert observe(str(tmp_path / "run-2")).requests


def test_no_coefficient_is_negative_and_the_rest_is_least_squares():
    rng = np.random.default_rng(0)
    features = rng.random((200, 4))
    values = features @ [1.0, 0.0, 2.0, 0.5] - 0.3 * features[:, 1]
    found = nonnegative(features, values)

    assert found.min() >= 0
    assert found[1] == 0
    gradient = features.T @ (features @ found - values)
    assert np.abs(gradient[[0, 2, 3]]).max() < 1e-6
    assert gradient[1] >= -1e-9


@pytest.mark.parametrize("rows", [1, 2, 3, 64, 65, 4000, 50000])
def test_segments_divide_the_rows(rows):
    assert sum(segments(rows)) == rows - 1


def test_a_shape_counts_what_rows_attend_to():
    slots, starts, stops = [0, 1, 2], [9, 0, 4], [10, 3, 5]  # decode, prompt of 3, decode
    numbers = np.array([*slots, *starts, *stops, 0, 1, 2, *range(5)], np.int32)

    assert shape(numbers, 5, 3, 3, 1) == PlanShape(5, 3, 3, 15, 1 + 2 + 3, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 9}, "format 9; this version reads 1"),
        ({"step": {"constant": -1.0}}, r">= 0.*step\.constant"),
        ({"host": {"constant": 0.1, "slices": 1}}, r"unknown field `slices`.*host"),
        ({"engine": {"num_slots": 0}}, r"num_slots|kv_groups"),
    ],
)
def test_a_wrong_profile_names_its_field(tmp_path, change, message):
    file = tmp_path / "p.json"
    write(profile(), str(file))
    assert read(str(file)) == profile()
    tree = json.loads(file.read_text())
    for name, value in change.items():
        tree[name] = {**tree[name], **value} if isinstance(value, dict) else value
    file.write_text(json.dumps(tree))

    with pytest.raises(ConfigError, match=message) as caught:
        read(str(file))
    assert "sim.profile" in str(caught.value)


def test_a_cache_of_another_size():
    engine = profile(pages=513, page_size=8).engine

    assert engine.with_cache(1000).cache_tokens == 1000
    assert engine.with_cache(1001).cache_tokens == 1008
    assert engine.with_cache(engine.cache_tokens) == engine


def test_between_small_and_large_steps_the_time_rises_late_and_beyond_as_before(recorded):
    def seconds(rows):  # memory-bound up to 66 rows
        return max(6e-3, 9e-5 * rows)

    seen = [*range(1, 9), *range(100, 400, 5)] * 2
    observed = observe(str(recorded))
    observed.steps = [TimedShape(PlanShape(n, 1, 1, 0, 0.0, 0), seconds(n)) for n in seen]
    times = NoisyStepTimes(fit(observed).step, HOST, None)

    for rows, most in ((4, 0.01), (20, 0.05), (40, 0.25), (150, 0.05), (3000, 0.05)):
        got = times.mean_s(PlanShape(rows, 1, 1, 0, 0.0, 0))
        assert got == pytest.approx(seconds(rows), rel=most)

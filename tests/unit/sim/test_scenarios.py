"""Scenarios, their answer, and its presentation."""

from __future__ import annotations

import json
from dataclasses import replace

import msgspec
import pytest

from sylvan.cli.main import main
from sylvan.config.bench import DataConfig
from sylvan.config.simulate import ArrivalConfig, SimConfig
from sylvan.protocol.errors import ConfigError
from sylvan.sim import table
from sylvan.sim.datasets import drawn
from sylvan.sim.parallel import SimulationError, run_all
from sylvan.sim.profile import write
from sylvan.sim.scenarios import Study, capacity_plans, scenarios
from tests.support.simulated import profile

DATA = DataConfig(
    dataset="shared-prefix", groups=12, prompts_per_group=10, system_tokens=60, question_tokens=20,
    output_tokens=12,
)  # fmt: skip


@pytest.fixture(scope="module")
def study():
    slo = {"ttft": 0.06, "tpot": 0.012}
    return Study(profile(max_running_reqs=8), drawn(DATA), slo, arrivals=1, seed=1, scatter=True)


@pytest.fixture(scope="module")
def results(study):
    config = SimConfig(replicas=(1, 2, 4), cache_tokens=(400, 4096))
    load = ArrivalConfig(sweep=("30/s", "400/s"))
    planned = scenarios(config, load, study.profile)
    return [*run_all(study, planned, 1, lambda done, total: None)]


def test_the_smallest_that_keeps_the_bounds_is_the_answer(results):
    for answer in capacity_plans(results, 0.9):
        those = [r.figures for r in results if r.figures["load"] == answer.load]
        best = answer.best.figures
        smaller = [
            f for f in those
            if (f["replicas"], f["cache_tokens"]) < (best["replicas"], best["cache_tokens"])
        ]  # fmt: skip
        assert answer.meets_slo
        assert best["goodput_share"] >= 0.9
        assert all(f["goodput_share"] < 0.9 for f in smaller)
    light, heavy = (a.best.figures["replicas"] for a in capacity_plans(results, 0.9))
    assert light < heavy


def test_a_gateway_takes_its_time(study):
    [scenario] = scenarios(SimConfig(replicas=(2,)), ArrivalConfig(rate=20.0), study.profile)
    direct, through = study.run(scenario), replace(study, gateway_s=0.25).run(scenario)

    for name in ("median_ttft_ms", "p99_ttft_ms", "median_e2e_latency_ms"):
        assert through.figures[name] == pytest.approx(direct.figures[name] + 250)
    assert through.figures["median_tpot_ms"] == pytest.approx(direct.figures["median_tpot_ms"])


def test_a_disturbed_recording_is_reported(results, study):
    def told(error):
        origin = msgspec.structs.replace(study.profile.origin, step_error=error)
        found = msgspec.structs.replace(study.profile, origin=origin)
        return table.warnings(results, found), table.described(found)

    quiet, disturbed = told(0.1), told(0.31)
    assert not any("record again" in text for text in (*quiet[0], quiet[1]))
    assert "recorded steps took 31% more or less" in disturbed[0][-1]
    assert disturbed[0][-1] in disturbed[1]


def test_bounds_that_no_scenario_keeps_name_the_best(results):
    [light, _] = capacity_plans(results, 1.1)

    assert not light.meets_slo
    assert light.best.figures["goodput_share"] == max(
        r.figures["goodput_share"] for r in results if r.figures["load"] == light.load
    )


def test_figures_are_those_of_the_requests(results):
    for result in results:
        figures = result.figures
        assert figures["completed"] == 120
        assert figures["failed"] == 0
        assert 0 < figures["busy"] <= 1
        assert 0 <= figures["hit_rate"] < 1
        assert figures["median_ttft_ms"] <= figures["p99_ttft_ms"] <= figures["max_ttft_ms"]
        assert figures["total_output_tokens"] == pytest.approx(
            figures["output_throughput"] * figures["duration"]
        )
        assert result.shares["ttft"][-1][0] == pytest.approx(figures["max_ttft_ms"])


def test_larger_caches_hit_more(results):
    hits = {(r.figures["load"], r.figures["replicas"], r.figures["cache_tokens"]):
            r.figures["hit_rate"] for r in results}  # fmt: skip

    assert hits["30/s", 1, 4096] > hits["30/s", 1, 400]


def test_the_scheduler_knows_the_bounds(study):
    config = SimConfig(schedules=("slo", "lpm"), cache_tokens=(4096,))
    tight = replace(study, slo={"ttft": 0.4, "tpot": 0.007})
    planned = scenarios(config, ArrivalConfig(sweep=("100/s",)), study.profile)
    slo, lpm = (tight.run(each).figures["goodput_share"] for each in planned)
    unknown, _ = (study.run(each).figures["p99_tpot_ms"] for each in planned)

    assert slo > lpm
    assert unknown != tight.run(planned[0]).figures["p99_tpot_ms"]


def test_processes_give_the_same_results_in_the_same_order(study, results):
    config = SimConfig(replicas=(1, 2, 4), cache_tokens=(400, 4096))
    planned = scenarios(config, ArrivalConfig(sweep=("30/s", "400/s")), study.profile)

    assert [*run_all(study, planned, 3, lambda done, total: None)] == results


def test_an_error_in_a_process_is_reported(study):
    planned = scenarios(SimConfig(cache_tokens=(4096, 4097)), ArrivalConfig(), study.profile)
    wrong = Study(study.profile, [([], None)], {}, 1, 1, scatter=True)

    with pytest.raises(SimulationError, match="process died; use fewer --jobs"):
        [*run_all(wrong, planned, 2, lambda done, total: None)]


@pytest.mark.parametrize(
    ("config", "load", "message"),
    [
        ({"policies": ("cache_awar",)}, {}, r"sim\.policies: .*did you mean 'cache_aware'"),
        ({"schedules": ("lpn",)}, {}, r"sim\.schedules: .*did you mean 'lpm'"),
        ({}, {"sweep": ("0",)}, "load.sweep: expected 8"),
        ({}, {"sweep": ("3/m",)}, "load.sweep: expected 8"),
        ({"replicas": tuple(range(1, 1002))}, {}, "1001 scenarios; the limit is 1000"),
    ],
)
def test_what_cannot_be_simulated_is_named(config, load, message):
    with pytest.raises(ConfigError, match=message):
        scenarios(SimConfig(**config), ArrivalConfig(**load), profile())


def test_the_command_tells_the_answer_and_writes_a_report(tmp_path, capsys):
    write(profile(), str(tmp_path / "p.json"))
    html, file = tmp_path / "r.html", tmp_path / "r.jsonl"
    words = [
        "simulate", "--model-profile", str(tmp_path / "p.json"), "--requests", "40",
        "--input-tokens", "50", "--output-tokens", "8", "--rate", "60", "--replicas", "1,2,4",
        "--policy", "round_robin,cache_aware", "--slo", "ttft=80", "--share", "0.9",
        "--html", str(html), "--output", str(file), "--tag", "t<1>",
    ]  # fmt: skip

    assert main(words) == 0
    out = capsys.readouterr().out
    assert "is enough" in out
    assert "round_robin" in out
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["replicas"] for line in lines] == [1, 1, 2, 2, 4, 4]
    assert {line["backend"] for line in lines} == {"simulation"}
    page = html.read_text()
    assert page.count("<svg") == 9
    assert "<script" not in page
    assert "http" not in page.replace("http-equiv", "")

    words[words.index("ttft=80")] = "ttft=0.001"
    assert main(words) == 1
    assert "no setup meets ttft 0.001 ms" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "sim.profile is missing"),
        (("--model-profile", "/none"), "cannot read /none"),
        (("--model-profile", "x", "--slo", "x=1"), "sim.slo"),
        (("--model-profile", "x", "--use-trace-timestamps"), "load.timestamps"),
        (("--model-profile", "x", "--against", "y", "--rate", "1"), "leave out load"),
        (("--model-profile", "x", "--against", "y", "--requests", "1"), "leave out data"),
        (("--model-profile", "x", "--html", "/none/x.html"), "result.html: /none/x.html"),
        (("fit",), "RECORDING is missing"),
        (("fit", "/none"), "-o is missing"),
        (("fit", "/none", "-o", "/none/x"), "-o: /none/x cannot be written"),
    ],
)
def test_the_command_names_what_is_wrong(capsys, words, message):
    assert main(["simulate", *words]) == 2
    assert message in capsys.readouterr().err

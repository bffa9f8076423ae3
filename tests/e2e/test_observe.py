"""Observation of a real server: metrics, dashboard, alerts, traces, logs, profiles."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.conftest import Server, running
from tests.support.collector import Collected, Span, collector
from tests.support.random_model import write_random_model

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "deploy" / "grafana" / "sylvan.json"
ALERTS = ROOT / "deploy" / "prometheus" / "sylvan-alerts.yaml"
KEY = "sk-never-to-be-logged"
PATIENCE_S = 90.0
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
STAGES = {
    "tokenize": "api",
    "api_server_dispatch": "api",
    "prefill_waiting": "scheduler",
    "prefill_forward": "scheduler",
    "decode_forward": "scheduler",
    "detokenize": "detokenizer",
    "network": "api",
}
# those of SGLang that a server without further capabilities exports
NAMES = (
    "num_running_reqs",
    "num_queue_reqs",
    "num_grammar_queue_reqs",
    "gen_throughput",
    "cache_hit_rate",
    "decode_sum_seq_lens",
    "token_usage",
    "full_token_usage",
    "swa_token_usage",
    "mamba_usage",
    "num_used_tokens",
    "kv_available_tokens",
    "kv_evictable_tokens",
    "kv_used_tokens",
    "spec_accept_length",
    "spec_accept_rate",
    "num_retracted_reqs",
    "num_paused_reqs",
    "utilization",
    "new_token_ratio",
    "is_cuda_graph",
    "max_total_num_tokens",
    "weight_memory_usage_gb",
    "kv_cache_memory_usage_gb",
    "page_size",
    "num_pages",
    "context_len",
    "lora_pool_slots_used",
    "lora_pool_slots_total",
    "lora_pool_utilization",
    "num_retracted_requests",
    "num_retracted_input_tokens",
    "num_retracted_output_tokens",
    "num_grammar_cache_hit",
    "num_grammar_aborted",
    "num_grammar_timeout",
    "num_grammar",
    "realtime_tokens",
    "forward_execution_seconds",
    "scheduler_idle_seconds",
    "scheduler_process_cpu_seconds",
    "queue_time_seconds",
    "per_stage_req_latency_seconds",
    "prompt_tokens",
    "generation_tokens",
    "spec_verify_calls",
    "cached_tokens",
    "num_requests",
    "num_so_requests",
    "num_aborted_requests",
    "prompt_tokens_histogram",
    "uncached_prompt_tokens_histogram",
    "generation_tokens_histogram",
    "get_loads_duration_seconds",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "evicted_tokens",
    "http_requests",
    "http_responses",
    "process_cpu_seconds",
    "http_requests_active",
)


@dataclass
class Observed:
    """A server under observation."""

    server: Server
    collected: Collected
    folder: Path
    http: httpx.Client

    def generate(self, rid: str, **fields: Any) -> httpx.Response:
        headers = fields.pop("headers", {})
        sampling = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
        body = {"text": f"once upon {rid}", "rid": rid, "sampling_params": sampling, **fields}
        response = self.http.post("/generate", json=body, headers=headers)
        assert response.status_code == 200, response.text
        return response

    def metrics(self) -> dict[str, list[Any]]:
        text = self.http.get("/metrics").text
        return {f.name: list(f.samples) for f in text_string_to_metric_families(text)}

    def trace(self, rid: str, count: int) -> list[Span]:
        """The spans of a request, once they are at the collector."""

        def own() -> list[Span]:
            ids = {s.trace_id for s in self.collected.spans if s.attributes.get("rid") == rid}
            return [s for s in self.collected.spans if s.trace_id in ids]

        until(lambda: len(own()) >= count)
        return own()


def until(condition: Callable[[], object], lacks: Callable[[], object] = lambda: "") -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"it did not come about: {lacks()}"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    folder = tmp_path_factory.mktemp("observed")
    model = write_random_model(folder / "model")
    with collector() as collected:
        flags = (
            *("--server.api-key", KEY, "--enable-trace"),
            *("--otlp-traces-endpoint", collected.grpc_url),
            *("--log-requests", "--log-requests-level", "3", "--log-requests-format", "json"),
            *("--log-requests-target", str(folder / "logs")),
            *("--observe.report-dir", str(folder / "reports"), "--max-running-requests", "4"),
            *("--tokenizer-metrics-allowed-custom-labels", "team"),
        )
        headers = {"authorization": f"Bearer {KEY}"}
        with (
            running(str(model), *flags) as server,
            httpx.Client(base_url=server.url, headers=headers, timeout=PATIENCE_S) as http,
        ):
            http.post("/set_trace_level?level=3")
            yield Observed(server, collected, folder, http)


# ---- metrics


def test_metrics_have_the_names_that_dashboards_for_sglang_know(observed: Observed) -> None:
    observed.generate("names")
    found = observed.metrics()
    missing = [name for name in NAMES if not found.get(f"sglang:{name}")]
    assert not missing
    [running_reqs] = found["sglang:num_running_reqs"]
    assert {*running_reqs.labels} == {
        *("model_name", "engine_type", "tp_rank", "pp_rank", "moe_ep_rank")
    }


def test_stages_add_up_to_whole_requests(observed: Observed) -> None:
    for number in range(4):
        observed.generate(f"sum-{number}", stream=number % 2 == 0)
    found = observed.metrics()

    def total(name: str, suffix: str) -> float:
        rows = found[f"sglang:{name}"]
        return sum(row.value for row in rows if row.name.endswith(suffix))

    whole = total("e2e_request_latency_seconds", "_sum")
    assert total("per_stage_req_latency_seconds", "_sum") == pytest.approx(whole, rel=1e-9)
    seen = {row.labels["stage"] for row in found["sglang:per_stage_req_latency_seconds"]}
    assert seen == {*STAGES}


def test_the_schedulers_time_is_accounted_for(observed: Observed) -> None:
    def seconds() -> float:
        found = observed.metrics()
        names = ("forward_execution_seconds", "scheduler_bubble_seconds", "scheduler_idle_seconds")
        rows = [row for name in names for row in found[f"sglang:{name}"]]
        return sum(row.value for row in rows if row.name.endswith("_total"))

    observed.generate("busy-1")
    until(lambda: seconds() > 0)
    before, began = seconds(), time.monotonic()
    observed.generate("busy-2")
    time.sleep(0.5)
    observed.generate("busy-3")  # ends the idle stretch
    until(lambda: seconds() - before >= 0.5)
    assert seconds() - before <= time.monotonic() - began + 1.0


def test_promtool_reads_what_is_exported(observed: Observed) -> None:
    promtool = _program("promtool")
    text = observed.http.get("/metrics").content
    done = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, check=False
    )
    # names are SGLang's, which its linter does not like; what cannot be read it calls an error
    assert b"error while linting" not in done.stderr
    assert done.returncode in (0, 3)


@pytest.mark.slow
def test_dashboard_and_alerts_show_what_a_real_server_exports(
    observed: Observed, tmp_path: Path
) -> None:
    """Every query of the dashboard finds numbers in Prometheus, and every alert can be judged."""
    key = tmp_path / "key"
    key.write_text(KEY)
    with _prometheus(tmp_path, observed.server.url.removeprefix("http://")) as prometheus:
        queries = [*_dashboard_queries(), *_alert_queries("sylvan")]
        wanted = [query for query in queries if "tenant_tokens" not in query]  # there are none
        assert len(wanted) > 50
        silent = set(wanted)

        def all_answer() -> bool:
            observed.generate(f"load-{time.monotonic_ns()}", stream=True)
            refused = {"text": "x", "sampling_params": {"regex": "("}}
            assert observed.http.post("/generate", json=refused).status_code == 400
            silent.difference_update([q for q in silent if prometheus(q)])
            return not silent

        until(all_answer, lambda: silent)


def test_alert_rules_are_well_formed() -> None:
    done = subprocess.run(
        [_program("promtool"), "check", "rules", str(ALERTS)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _dashboard_queries() -> list[str]:
    board = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    return [
        query.replace("$__rate_interval", "1m")
        .replace('"$model"', '".*"')
        .replace('"$instance"', '".*"')
        for query in queries
    ]


def _alert_queries(group: str) -> list[str]:
    """The values that alerts compare with bounds."""
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    rules = [rule for each in groups if each["name"] == group for rule in each["rules"]]
    return [re.split(r"\s(?:>|<|==)\s", rule["expr"])[0].replace("[5m]", "[1m]") for rule in rules]


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (Debian: prometheus)")
    return found


class _Prometheus:
    """A server that scrapes a target."""

    def __init__(self, folder: Path, target: str) -> None:
        config = {
            "global": {"scrape_interval": "1s"},
            "scrape_configs": [
                {"job_name": "sylvan", "static_configs": [{"targets": [target]}]},
            ],
        }
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        self._port = _free_port()
        self._command = (
            *(_program("prometheus"), f"--config.file={folder / 'prometheus.yaml'}"),
            *(f"--storage.tsdb.path={folder / 'data'}", "--log.level=error"),
            f"--web.listen-address=127.0.0.1:{self._port}",
        )

    def __enter__(self) -> Callable[[str], list[Any]]:
        self._process = subprocess.Popen(self._command)
        url = f"http://127.0.0.1:{self._port}/api/v1/query"

        def ask(query: str) -> list[Any]:
            try:
                answer = httpx.get(url, params={"query": query}, timeout=PATIENCE_S)
            except httpx.TransportError:  # it starts
                return []
            assert answer.status_code in (200, 503), f"{query}: {answer.text}"
            if answer.status_code == 503:
                return []
            rows = answer.json()["data"]["result"]
            return [row for row in rows if row["value"][1] != "NaN"]

        return ask

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(60)


_prometheus = _Prometheus


def _free_port() -> int:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


# ---- traces


def test_a_request_is_one_tree_of_spans_across_processes(observed: Observed) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
    observed.generate("tree", headers=headers)
    spans = [s for s in observed.trace("tree", 8) if s.trace_id == TRACE]
    [own] = [s for s in spans if s.parent_id == PARENT]
    stages = [s for s in spans if s is not own]
    assert own.name == "POST /generate"
    assert own.process == ("sylvan", "api")
    assert own.attributes["gen_ai.usage.output_tokens"] == 8
    assert "first_text" in own.events
    assert {s.name: s.process for s in stages} == {n: ("sylvan", p) for n, p in STAGES.items()}
    assert {s.parent_id for s in stages} == {own.span_id}
    stages.sort(key=lambda s: s.start_ns)
    assert [s.name for s in stages] == [*STAGES]
    assert sum(s.seconds for s in stages) == pytest.approx(own.seconds, abs=1e-5)
    shown = observed.http.get("/trace/tree").json()
    assert shown["trace_id"] == TRACE
    assert {s["span_id"] for s in shown["spans"]} == {s.span_id for s in spans}


def test_what_callers_do_not_want_recorded_is_not_sent(observed: Observed) -> None:
    other = TRACE[::-1]
    headers = {"traceparent": f"00-{other}-{PARENT}-00"}
    observed.generate("unsampled", headers=headers)
    observed.generate("sampled")
    observed.trace("sampled", 8)
    assert other not in {s.trace_id for s in observed.collected.spans}
    assert observed.http.get("/trace/unsampled").json()["trace_id"] == other


def test_levels_of_traces(observed: Observed) -> None:
    try:
        for level, count in ((0, 0), (1, 1), (2, 8)):
            response = observed.http.post(f"/set_trace_level?level={level}")
            assert response.status_code == 200, response.text
            observed.generate(f"level-{level}")
            observed.generate(f"level-{level}-again")
            if count:
                assert len(observed.trace(f"level-{level}-again", count)) == count
                assert not any(s.events for s in observed.trace(f"level-{level}", count))
        assert not [s for s in observed.collected.spans if s.attributes.get("rid") == "level-0"]
    finally:
        observed.http.post("/set_trace_level?level=3")


def test_steps_are_shown_on_a_timeline(observed: Observed) -> None:
    observed.generate("steps")
    events = observed.http.get("/trace/steps").json()["traceEvents"]
    steps = [e for e in events if e["ph"] == "X" and e["tid"] == 2]
    own = [e for e in steps if e["args"]["first_rid"].startswith("steps.")]
    assert [e["name"] for e in own] == ["prefill"] + ["decode"] * 7
    assert all(e["dur"] > 0 for e in own)
    begins = [e["ts"] for e in steps]
    assert begins == sorted(begins)
    assert abs(begins[-1] / 1e6 - time.time()) < PATIENCE_S


# ---- logs


def test_requests_are_logged_without_secrets(observed: Observed) -> None:
    observed.generate("logged")
    file = observed.folder / "logs" / "requests.log"
    until(lambda: '"finish","rid":"logged"' in file.read_text())
    text = file.read_text()
    assert KEY not in text
    lines = [json.loads(line) for line in text.splitlines()]
    received, finished = (line for line in lines if line["rid"] == "logged")
    assert received["prompt"] == "once upon logged"
    assert finished["finish"] == "length"
    assert sum(finished["stages_s"].values()) == pytest.approx(finished["e2e_s"], abs=1e-4)


# ---- profiles


@pytest.mark.slow
def test_a_profile_tells_what_ops_take(observed: Observed) -> None:
    folder = observed.folder / "profiles"
    body = {"output_dir": str(folder), "profile_id": "one"}
    assert observed.http.post("/start_profile", json=body).status_code == 200
    again = observed.http.post("/start_profile", json=body)
    assert again.status_code == 400
    assert "stop it first" in again.text
    observed.generate("profiled")
    stopped = observed.http.post("/stop_profile")
    assert stopped.status_code == 200, stopped.text
    files = [Path(line) for line in stopped.text.splitlines()[1:]]
    by_kind = {path.name.rpartition("-")[2]: path for path in files}
    assert json.loads(by_kind["torch.trace.json"].read_bytes())["traceEvents"]
    if "ops.json" in by_kind:  # there are compiled kernels
        profile = json.loads(by_kind["ops.json"].read_bytes())
        assert profile["steps"] >= 8
        assert profile["bytes_per_s"] > 0
        linear = [op for op in profile["ops"] if op["op"] == "Linear"]
        assert all(op["us_per_step"] > 0 and op["weight_bytes"] > 0 for op in linear)
        assert all(op["floor_share"] > 0 for op in linear)
    assert observed.http.post("/stop_profile").status_code == 400


def test_a_profile_of_so_many_steps_ends_by_itself(observed: Observed) -> None:
    folder = observed.folder / "few"
    body = {"output_dir": str(folder), "num_steps": 3, "activities": ["CPU"]}
    assert observed.http.post("/start_profile", json=body).status_code == 200
    observed.generate("few")
    until(lambda: list(folder.glob("*-torch.trace.json")))


def test_a_profile_that_cannot_be_written_leaves_the_server_serving(observed: Observed) -> None:
    taken = observed.folder / "taken"
    taken.write_text("")
    body = {"output_dir": str(taken / "x")}
    refused = observed.http.post("/start_profile", json=body)
    assert refused.status_code == 400
    assert "output_dir" in refused.text, refused.text
    body = {"output_dir": "/dev/full-of-it", "activities": ["NPU"]}
    assert "activities" in observed.http.post("/start_profile", json=body).text
    observed.generate("after")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 KiB; the test is skipped where none can be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    try:
        subprocess.run(words, check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        pytest.skip("needs to be allowed to mount")
    yield folder
    subprocess.run(["umount", str(folder)], check=True, timeout=60)


@pytest.mark.slow
def test_a_profile_to_a_full_disk_leaves_the_server_serving(
    observed: Observed, small_disk: Path
) -> None:
    body = {"output_dir": str(small_disk), "activities": ["CPU"]}
    assert observed.http.post("/start_profile", json=body).status_code == 200
    observed.generate("full-disk")
    (small_disk / "others").write_bytes(bytes(64 << 10))

    refused = observed.http.post("/stop_profile")

    assert refused.status_code == 400, refused.text
    assert "the profile could not be written whole" in refused.text
    observed.generate("after-it")
    assert [path.name for path in small_disk.iterdir()] == ["others"]  # half of it is of no use
    again = {"output_dir": str(observed.folder / "roomy"), "activities": ["CPU"]}
    assert observed.http.post("/start_profile", json=again).status_code == 200
    assert observed.http.post("/stop_profile").status_code == 200


# ---- what goes wrong


@pytest.mark.slow
def test_ten_times_too_much_keeps_the_server_live(observed: Observed) -> None:
    """Forty requests at a time where four can run, and a dashboard that is open meanwhile."""
    seen: list[int] = []
    with ThreadPoolExecutor(40) as pool:
        calls = [pool.submit(observed.generate, f"flood-{number}") for number in range(80)]
        while not all(call.done() for call in calls):
            seen += [observed.http.get(path).status_code for path in ("/live", "/metrics")]
    assert {*seen} == {200}
    assert all(call.result().status_code == 200 for call in calls)


@pytest.mark.slow
def test_however_many_values_of_a_label_come_a_hundred_are_distinguished(
    observed: Observed,
) -> None:
    """A million of them are given to the same code in tests/unit/runtime/server/test_observe.py."""

    def ask(number: int) -> None:
        value = (
            "\ud800" if number == 0 else f"{number}" + "x" * 1000
        )  # half of a pair of surrogates
        headers = {"x-custom-labels": json.dumps({"team": value, f"unknown-{number}": "x"})}
        sampling = {"max_new_tokens": 1}
        observed.generate(f"label-{number}", headers=headers, sampling_params=sampling)

    with ThreadPoolExecutor(8) as pool:
        assert not any(pool.map(ask, range(160)))
    found = observed.metrics()
    rows = [row for row in found["sglang:num_requests"] if row.labels["team"]]
    assert len({row.labels["team"] for row in rows}) == 101
    assert sum(row.value for row in rows if row.name.endswith("_total")) == 160
    assert not any("unknown" in name for row in rows for name in row.labels)
    many = {"text": "x", "custom_labels": {f"{number}": "x" for number in range(100_000)}}
    refused = observed.http.post("/generate", json=many)
    assert refused.status_code == 400
    assert "limits.body_names" in refused.text


@pytest.mark.slow
def test_prometheus_continues_after_the_server_was_restarted(tmp_path: Path) -> None:
    """A dashboard is open meanwhile: rates count from 0 again, and nothing is negative."""
    model = write_random_model(tmp_path / "model")
    port = _free_port()
    body = {"text": "x", "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
    query = "sglang:generation_tokens_total"

    def value(rows: list[Any]) -> float:
        return sum(float(row["value"][1]) for row in rows)

    with _prometheus(tmp_path, f"127.0.0.1:{port}") as prometheus:
        with running(str(model), port=port) as first:
            for _ in range(3):
                httpx.post(f"{first.url}/generate", json=body, timeout=PATIENCE_S)
            until(lambda: value(prometheus(query)) == 12)
            first.kill()
        until(lambda: value(prometheus("up")) == 0)
        with running(str(model), port=port) as second:
            assert httpx.post(f"{second.url}/generate", json=body, timeout=60).status_code == 200
            until(lambda: value(prometheus(query)) == 4)
            until(lambda: value(prometheus("up")) == 1)
            increase = value(prometheus(f"increase({query}[5m])"))
            assert increase >= 0


@pytest.mark.slow
def test_neither_a_collector_that_hangs_nor_a_full_disk_keeps_the_server_from_working_and_ending(
    tmp_path: Path,
) -> None:
    model = write_random_model(tmp_path / "model")
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "requests.log").symlink_to("/dev/full")
    body = {"text": "x", "sampling_params": {"max_new_tokens": 4}}
    with collector() as collected:
        collected.hangs.set()
        flags = (
            *("--enable-trace", "--otlp-traces-endpoint", collected.grpc_url),
            *("--log-requests", "--log-requests-target", str(logs)),
        )
        with running(str(model), *flags) as server:  # it fails if that takes a minute
            for _ in range(5):
                answer = httpx.post(f"{server.url}/generate", json=body, timeout=PATIENCE_S)
                assert answer.status_code == 200
        assert collected.spans == []


def test_a_collector_that_hangs_costs_spans_only(observed: Observed) -> None:
    observed.collected.hangs.set()
    try:
        for number in range(20):
            observed.generate(f"hang-{number}")
    finally:
        observed.collected.hangs.clear()
        observed.collected.may_go_on.set()
    assert observed.http.get("/health_generate").status_code == 200


@pytest.mark.slow
def test_traces_over_http_continue_from_the_gateway_to_the_server(
    tmp_path: Path,
) -> None:
    """One tree: client, gateway, API process, scheduler, detokenizer."""
    model = write_random_model(tmp_path / "model")
    with collector() as collected:
        flags = ("--enable-trace", "--otlp-traces-endpoint", collected.http_url)
        router = tmp_path / "router.yaml"
        router.write_text(
            f"observe:\n  trace: true\n  trace_endpoint: {collected.http_url}\n  metrics_port: 0\n"
        )
        with running(str(model), *flags, "--dp", "2", "--router-config", str(router)) as server:
            body = {"prompt": "x", "max_tokens": 3}
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
            url = f"{server.url}/v1/completions"
            answer = httpx.post(url, json=body, headers=headers, timeout=PATIENCE_S)
            assert answer.status_code == 200, answer.text
            until(lambda: len([s for s in collected.spans if s.trace_id == TRACE]) >= 9)
        spans = [s for s in collected.spans if s.trace_id == TRACE]
        [front] = [s for s in spans if s.parent_id == PARENT]
        assert front.process[0] == "sylvan-gateway"
        [own] = [s for s in spans if s.parent_id == front.span_id]
        assert own.process == ("sylvan", "api")
        assert {s.name for s in spans if s.parent_id == own.span_id} == {*STAGES}


@pytest.mark.slow
def test_a_scheduler_that_hangs_leaves_a_report(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its last 200 decisions, and the stacks of all processes on standard error."""
    model = write_random_model(tmp_path / "model")
    reports = tmp_path / "reports"
    flags = ("--scheduler.hang-timeout-s", "2", "--observe.report-dir", str(reports))
    with (
        running(str(model), *flags) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as http,
    ):
        body = {"text": "x", "sampling_params": {"max_new_tokens": 210, "ignore_eos": True}}
        assert http.post("/generate", json=body).status_code == 200
        os.kill(_scheduler_of(server.process.pid), signal.SIGSTOP)
        until(lambda: http.get("/ready").status_code == 503)
        assert http.get("/live").status_code == 200
        assert "sglang:num_running_reqs" in http.get("/metrics").text
        assert http.get("/trace/steps").status_code == 200
        until(lambda: list(reports.glob("hang-scheduler-*.json")))
        until(lambda: http.get("/ready").status_code == 200)
        assert http.post("/generate", json=body).status_code == 200
    [file] = reports.glob("hang-scheduler-*.json")
    report = json.loads(file.read_bytes())
    assert {*report["pids"]} == {"scheduler", "detokenizer"}
    assert len(report["steps"]) == 200
    assert report["steps"][-1]["completed_s"] > 0
    assert [step["number"] for step in report["steps"]] == [*range(11, 211)]
    stacks = capfd.readouterr().err
    assert "hangs; killing it, its stacks follow" in stacks
    # faulthandler names the frames of each process: the scheduler is stopped and prints none
    for module in ("supervisor.py", "detokenizer_loop.py"):
        assert module in stacks


def _scheduler_of(parent: int) -> int:
    for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        if b"scheduler_process" in Path(f"/proc/{child}/cmdline").read_bytes():
            return int(child)
    raise AssertionError("there is no scheduler process")

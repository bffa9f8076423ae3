"""Labels, traces and logs of requests."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sylvan.config.tree import ObserveConfig
from sylvan.protocol.errors import ConfigError
from sylvan.protocol.steps import StepLog, read_steps
from sylvan.runtime.server.observe import buckets
from sylvan.runtime.server.observe.labels import MAX_VALUES, MetricLabels
from sylvan.runtime.server.observe.traces import read_context
from tests.support.http import Client

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
GENERATE = {"text": "abc", "sampling_params": {"max_new_tokens": 4}}


async def samples(client):
    text = (await client.get("/metrics")).text
    return [s for family in text_string_to_metric_families(text) for s in family.samples]


def total(found, name, **labels):
    return sum(
        s.value
        for s in found
        if s.name == name and all(s.labels.get(key) == value for key, value in labels.items())
    )


@pytest.mark.parametrize("streamed", [False, True])
async def test_stages_add_up_to_the_whole_time(client, streamed):
    for i in range(5):
        body = {**GENERATE, "text": "a" * (i + 1), "stream": streamed}
        await client.post("/generate", body)
    found = await samples(client)
    whole = total(found, "sglang:e2e_request_latency_seconds_sum")
    parts = total(found, "sglang:per_stage_req_latency_seconds_sum")
    assert whole > 0
    assert parts == pytest.approx(whole, rel=1e-9)
    assert total(found, "sglang:e2e_request_latency_seconds_count") == 5


async def test_streams_are_distinguished(client):
    await client.post("/generate", GENERATE)
    await client.post("/generate", {**GENERATE, "stream": True})
    found = await samples(client)
    for streaming in ("true", "false"):
        assert total(found, "sglang:prompt_tokens_total", is_streaming=streaming) == 3
        count = "sglang:time_to_first_token_seconds_count"
        assert total(found, count, is_streaming=streaming) == 1


async def test_labels_of_the_operator_and_of_clients(engine):
    observe = ObserveConfig(
        metrics_prefix="my:", metric_labels={"region": "eu"}, custom_labels=("team",)
    )
    client = Client(engine, observe=observe)
    header = {"x-custom-labels": json.dumps({"team": "search", "other": "x"})}
    await client.post("/generate", GENERATE, headers=header)
    await client.post("/generate", GENERATE, headers={"x-custom-labels": "{nonsense"})
    found = await samples(client)
    assert total(found, "my:generation_tokens_total", team="search", region="eu") == 4
    assert total(found, "my:generation_tokens_total", team="", region="eu") == 4
    assert not any(s.name.startswith("sglang:") or "other" in s.labels for s in found)
    assert total(found, "my:num_running_reqs", region="eu", tp_rank="0") == 0


async def test_a_flood_of_label_values_is_a_few_series(engine):
    client = Client(engine, observe=ObserveConfig(custom_labels=("user", "team")))
    before = len(await samples(client))
    for i in range(MAX_VALUES + 5):
        labels = json.dumps({"user": f"u{i}", "team": f"t{i % 50}"})
        await client.post("/generate", GENERATE, headers={"x-custom-labels": labels})
    found = await samples(client)
    assert total(found, "sglang:num_requests_total") == MAX_VALUES + 5
    values = {s.labels["user"] for s in found if "user" in s.labels}
    assert len(values) <= MAX_VALUES + 1
    assert total(found, "sglang:num_requests_total", user="other") > 0
    again = MetricLabels({}, {}, ("user",))
    assert len({again.values({"user": str(i)}) for i in range(1_000_000)}) == MAX_VALUES + 1
    assert len(found) - before < 512 * 250


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ('{"user": "\\ud800x"}', "?x"),  # half of a surrogate pair
        ('{"user": "a\\n\\u0000\\"b"}', 'a\n\x00"b'),
        ('{"user": {"a": [1]}}', "{'a': [1]}"),
        ('{"user": "' + "x" * 5000 + '"}', "x" * 128),
        ("[" * 100_000, ""),
        ('{"user": ' + "9" * 6000 + "}", ""),
        ("[1]", ""),
    ],
)
async def test_no_label_of_a_client_spoils_the_page(engine, header, value):
    client = Client(engine, observe=ObserveConfig(custom_labels=("user",)))
    answer = await client.post("/generate", GENERATE, headers={"x-custom-labels": header})
    assert answer.status_code == 200
    assert (await client.get("/metrics")).status_code == 200
    assert total(await samples(client), "sglang:num_requests_total", user=value) == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"metric_labels": {"le": "x"}},
        {"metric_labels": {"a-b": "x"}},
        {"custom_labels": ("tenant",)},
        {"custom_labels": ("a",), "metric_labels": {"a": "x"}},
        {"ttft_buckets": (2.0, 1.0)},
        {"prompt_token_buckets": ("tse", "1", "2")},
        {"output_token_buckets": ("custom", "x")},
    ],
)
def test_labels_and_bounds_that_are_none_are_refused(engine, settings):
    [(name, _), *_] = settings.items()
    with pytest.raises(ConfigError, match=f"observe.{name}"):
        Client(engine, observe=ObserveConfig(**settings))


def test_bounds():
    assert buckets.tokens(("custom", "1", "10"), "x") == (1, 10)
    assert buckets.tokens(("tse", "100", "2", "3"), "x") == (96, 98, 99, 100, 101, 102, 104)
    assert buckets.tokens((), "x") == buckets.tokens(("default",), "x") == buckets.TOKENS
    assert buckets.seconds((), (1.0, 2.0), "x") == (1.0, 2.0)


async def test_tenants_are_accounted_by_tier(engine, tmp_path):
    key = {"sha256": hashlib.sha256(b"k").hexdigest(), "tenant": "t"}
    (tmp_path / "keys.json").write_text(json.dumps({"keys": [key]}))
    client = Client(engine, api_key_file=str(tmp_path / "keys.json"))
    body = {"text": "abcd", "sampling_params": {"max_new_tokens": 3}}
    await client.post("/generate", body, headers={"authorization": "Bearer k"})
    found = await samples(client)
    counts = {s.labels["kind"]: s.value for s in found if s.name == "sglang:tenant_tokens_total"}
    assert counts == {"prompt_computed": 2, "prompt_device": 2, "output": 3}


def test_contexts_of_callers():
    good = read_context({"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "v=1"})
    assert (good.trace_id, good.parent_id, good.sampled, good.state) == (TRACE, PARENT, True, "v=1")
    assert not read_context({"traceparent": f"00-{TRACE}-{PARENT}-00"}).sampled
    later = read_context({"traceparent": f"cc-{TRACE}-{PARENT}-01-more"})
    assert later.trace_id == TRACE
    for wrong in (
        "",
        "00-zz-1-01",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-01-more",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE.upper()}-{PARENT}-01",
    ):
        made = read_context({"traceparent": wrong})
        assert made.trace_id != TRACE
        assert len(made.trace_id) == 32
        assert (made.parent_id, made.sampled) == ("", True)


async def test_the_trace_of_a_request(client):
    body = {**GENERATE, "rid": "r1"}
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    await client.post("/generate", body, headers=headers)
    trace = (await client.get("/trace/r1")).json()
    own, *stages = trace["spans"]
    assert trace["trace_id"] == TRACE
    assert own["name"] == "POST /generate"
    assert own["parent_id"] == trace["parent_span_id"] == PARENT
    assert own["attributes"]["gen_ai.usage.output_tokens"] == 4
    assert {s["parent_id"] for s in stages} == {own["span_id"]}
    assert stages[0]["name"] == "tokenize"
    assert stages[-1]["name"] == "network"
    assert sum(s["duration_ms"] for s in stages) == pytest.approx(own["duration_ms"], abs=0.01)
    recent = (await client.get("/trace?last=10")).json()["traces"]
    assert [t["rid"] for t in recent] == ["r1"]


async def test_fields_of_the_body_stand_for_headers(engine):
    client = Client(engine, observe=ObserveConfig(custom_labels=("team",)))
    fields = {
        "external_trace_header": {"Traceparent": f"00-{TRACE}-{PARENT}-01"},
        "custom_labels": {"team": "search", "other": 1},
    }
    response = await client.post("/generate", {**GENERATE, "rid": "r1", **fields})
    assert "x-sylvan-ignored-fields" not in response.headers
    assert (await client.get("/trace/r1")).json()["parent_span_id"] == PARENT
    assert total(await samples(client), "sglang:num_requests_total", team="search") == 1
    wrong = {"external_trace_header": 7, "custom_labels": [1]}
    assert (await client.post("/generate", {**GENERATE, **wrong})).status_code == 200


async def test_an_unknown_request_has_no_trace(client):
    response = await client.get("/trace/never")
    assert response.status_code == 404
    assert "1024" in response.json()["error"]["message"]


async def test_traces_are_bounded_and_of_their_tenant(engine, tmp_path, monkeypatch):
    keys = [
        {"sha256": hashlib.sha256(name.encode()).hexdigest(), "tenant": name} for name in ("a", "b")
    ]
    (tmp_path / "keys.json").write_text(json.dumps({"keys": keys}))
    client = Client(
        engine,
        api_key_file=str(tmp_path / "keys.json"),
        admin_api_key=_secret("root"),
    )

    def bearer(key):
        return {"authorization": f"Bearer {key}"}

    monkeypatch.setattr(client.context.observing.traces, "_size", 3)
    for rid in ("r1", "r2", "r3", "r4"):
        await client.post("/generate", {**GENERATE, "rid": rid}, headers=bearer("a"))
    mine = (await client.get("/trace", headers=bearer("a"))).json()["traces"]
    assert [t["rid"] for t in mine] == ["r4", "r3", "r2"]
    assert (await client.get("/trace", headers=bearer("b"))).json()["traces"] == []
    assert (await client.get("/trace/r4", headers=bearer("b"))).status_code == 404
    assert (await client.get("/trace/r4", headers=bearer("root"))).json()["rid"] == "r4"
    assert (await client.get("/trace/r4")).status_code == 401


def _secret(text):
    from sylvan.config.values import Secret

    return Secret(text)


async def test_steps_as_trace_events(client):
    log = StepLog()
    log.completed(log.launched(1.0, 1.1, (2, 1, 30, 31, 2, 4, 0, 0), b"r"), 1.3)
    log.launched(1.3, 1.4, (2, 2, 0, 2, 2, 4, 0, 0), b"r")
    client.engine.manager.router.clients[0].read_steps = lambda last: read_steps(log.buffer, last)
    events = (await client.get("/trace/steps")).json()["traceEvents"]
    slices = [e for e in events if e["ph"] == "X" and e["tid"] == 2]
    assert [e["name"] for e in slices] == ["mixed", "decode"]
    assert [e["args"]["forward_mode"] for e in slices] == ["MIXED", "DECODE"]
    assert slices[0]["dur"] == pytest.approx(200_000, abs=1)
    assert slices[1]["args"]["under_way"] is True
    records = (await client.get("/trace/steps?last=1&format=json")).json()["schedulers"]
    [record] = records[0]["steps"]
    assert (record["number"], record["waiting"]) == (2, 4)
    assert (await client.get("/trace/steps?last=0")).status_code == 400


async def test_levels_of_request_logs(engine, caplog):
    secret = "sk-not-to-be-logged"
    settings = {"observe": ObserveConfig(log_requests=True, log_requests_format="json")}
    client = Client(engine, api_key=_secret(secret), **settings)
    headers = {"authorization": f"Bearer {secret}"}
    long = {"text": "x" * 1500, "sampling_params": {"max_new_tokens": 4, "stop": ["hush"]}}
    seen = {}
    for level in range(4):
        body = {"log_requests_level": level}
        assert (await client.post("/configure_logging", body, headers=headers)).status_code == 200
        caplog.clear()
        with caplog.at_level(logging.INFO, "sylvan.requests"):
            await client.post("/generate", long, headers=headers)
        lines = [r.getMessage() for r in caplog.records if r.name == "sylvan.requests"]
        assert not any(secret in line for line in lines)
        seen[level] = [json.loads(line) for line in lines]
    for received, finished in seen.values():
        assert (received["event"], finished["event"]) == ("receive", "finish")
        assert received["trace_id"] == finished["trace_id"]
        assert finished["completion_tokens"] == 4
        assert sum(finished["stages_s"].values()) == pytest.approx(finished["e2e_s"], abs=1e-4)
    assert "sampling" not in seen[0][0]
    assert seen[1][0]["sampling"]["max_new_tokens"] == 4
    assert "hush" not in json.dumps(seen[1])
    assert "prompt" not in seen[1][0]
    assert seen[2][0]["prompt"] == "x" * 1024
    assert seen[3][0]["prompt"] == "x" * 1500
    assert seen[3][1]["output"] == "xxxx"


async def test_request_logs_in_a_folder(engine, tmp_path):
    observe = ObserveConfig(log_requests=True, log_requests_target=(str(tmp_path / "logs"),))
    client = Client(engine, observe=observe)
    await client.post("/generate", {**GENERATE, "rid": "here"})
    text = (tmp_path / "logs" / "requests.log").read_text()
    assert "receive rid='here'" in text
    assert "finish rid='here'" in text
    await client.context.observing.close()
    (tmp_path / "file").write_text("")
    target = (str(tmp_path / "file"),)
    with pytest.raises(ConfigError, match="log_requests_target"):
        Client(engine, observe=ObserveConfig(log_requests_target=target))


async def test_a_full_disk_costs_lines_of_the_request_log_only(engine, tmp_path, caplog, capfd):
    file = tmp_path / "requests.log"
    file.symlink_to("/dev/full")  # every write fails as on a full disk
    settings = {"log_requests_target": (str(tmp_path),), "log_requests_format": "json"}
    client = Client(engine, observe=ObserveConfig(log_requests=True, **settings))
    for number in range(3):
        answer = await client.post("/generate", {**GENERATE, "rid": f"lost-{number}"})
        assert answer.status_code == 200
    [told] = [r.getMessage() for r in caplog.records if "lost" in r.getMessage()]
    assert "No space left on device" in told
    assert str(file) in told
    file.unlink()
    file.write_bytes(b'{"event": "finish", "rid": "tor')  # as much as found room
    await client.post("/generate", {**GENERATE, "rid": "there-is-room"})
    await client.context.observing.close()
    torn, *lines = file.read_text().splitlines()
    assert torn.endswith('"tor')
    assert [json.loads(line)["event"] for line in lines] == ["receive", "finish"]
    assert {json.loads(line)["rid"] for line in lines} == {"there-is-room"}
    assert "Traceback" not in capfd.readouterr().err


async def test_logging_can_be_configured(client):
    root = logging.getLogger()
    before = root.level
    try:
        body = {"log_requests": True, "log_level": "error", "log_requests_format": "json"}
        answer = (await client.post("/configure_logging", body)).json()
        assert answer["log_requests"] is True
        assert answer["log_level"] == "error"
        assert root.level == logging.ERROR
        for wrong in ({"log_requests_level": 4}, {"crash_dump_folder": "/x"}):
            response = await client.post("/configure_logging", wrong)
            assert response.status_code == 400
            assert next(iter(wrong)) in response.text
    finally:
        root.setLevel(before)


async def test_paths_may_be_left_out_of_the_access_log(engine, caplog):
    client = Client(engine, access_log=True, observe=ObserveConfig(access_log_exclude=("/heal",)))
    with caplog.at_level(logging.INFO, "sylvan.access"):
        await client.get("/health")
        await client.get("/live")
    assert [r.getMessage().split()[1] for r in caplog.records] == ["/live"]


async def test_a_trace_level_needs_a_collector(client):
    assert (await client.post("/set_trace_level?level=2", {})).status_code == 400
    assert (await client.post("/set_trace_level?level=0", {})).status_code == 200
    assert (await client.post("/set_trace_level?level=9", {})).status_code == 400


async def test_a_scrape_while_requests_end_sees_whole_numbers(client):
    """A dashboard that is open all the time."""
    client.engine.control.script = lambda request, prompt: "b" * 20

    async def scrape():
        for _ in range(20):
            found = await samples(client)
            tokens = total(found, "sglang:generation_tokens_total")
            assert tokens == total(found, "sglang:generation_tokens_histogram_sum")
            await asyncio.sleep(0)

    calls = (client.post("/generate", {"text": "abc", "sampling_params": {}}) for _ in range(30))
    await asyncio.gather(scrape(), *calls)

"""`sylvan bench serve` against a real server."""

from __future__ import annotations

import json
import subprocess
import sys
from html.parser import HTMLParser

import httpx
import pytest

pytestmark = pytest.mark.slow

CODE = "import sys; from sylvan.cli import main; sys.exit(main())"
SMALL = ("--requests", 6, "--input-tokens", 24, "--output-tokens", 5, "--random-range-ratio", 1)


def bench(url, *words, key="secret"):
    command = [sys.executable, "-c", CODE, "bench", "serve", "--url", url, *map(str, words)]
    if key:
        command += ["--api-key", key]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("api", ["native", "completions", "chat"])
def test_each_api_is_measured(server, tmp_path, api):
    file = tmp_path / "runs.jsonl"

    done = bench(server.url, *SMALL, "--api", api, "--output", file, "--output-details")

    assert done.returncode == 0, done.stderr
    assert "Time to first token" in done.stdout
    [found] = map(json.loads, file.read_text().splitlines())
    assert (found["completed"], found["failed"], found["backend"]) == (6, 0, api)
    assert found["total_output_tokens"] == 30
    assert found["output_lens"] == [5] * 6
    if api != "chat":  # its template adds to the prompt
        assert found["input_lens"] == [24] * 6
    for first, gaps, last in zip(found["ttfts"], found["itls"], found["latencies"], strict=True):
        assert len(gaps) <= 4
        assert first + sum(gaps) <= last + 1e-6
    assert all(
        0 < first <= last for first, last in zip(found["ttfts"], found["latencies"], strict=True)
    )
    assert found["median_ttft_ms"] <= found["median_e2e_latency_ms"]
    assert found["config"]["data"]["requests"] == 6
    assert found["server_info"]["model_path"]
    assert "secret" not in file.read_text()


def test_prompts_that_share_a_prefix_hit_the_cache(server, tmp_path):
    file = tmp_path / "runs.jsonl"
    groups = ("--dataset-name", "generated-shared-prefix", "--gsp-num-groups", 1)
    sizes = ("--gsp-prompts-per-group", 6, "--gsp-system-prompt-len", 200, "--gsp-question-len", 8)

    done = bench(
        server.url, *groups, *sizes, "--gsp-output-len", 2, "--gsp-range-ratio", 1,
        "--flush-cache", "--concurrency", 1, "--output", file,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    [found] = map(json.loads, file.read_text().splitlines())
    assert found["max_concurrent_requests"] == 1
    assert found["total_cached_tokens"] >= 5 * 200


def test_conversations_repeat_what_was_said(server, tmp_path):
    file = tmp_path / "runs.jsonl"

    words = (*SMALL, "--turns", 3, "--output", file, "--output-details", "--warmup-requests", 0)
    done = bench(server.url, *words)

    assert done.returncode == 0, done.stderr
    [found] = map(json.loads, file.read_text().splitlines())
    assert found["completed"] == 6
    lengths = sorted(found["input_lens"])
    assert lengths[:2] == [24, 24]
    assert lengths[-1] > 2 * 24  # three questions, two answers


def test_a_sweep_makes_one_page_and_a_line_for_each_load(server, tmp_path):
    file, page = tmp_path / "runs.jsonl", tmp_path / "page.html"

    done = bench(server.url, *SMALL, "--sweep", "1,3,50/s", "--output", file, "--html", page)

    assert done.returncode == 0, done.stderr
    runs = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(run["max_concurrency"], run["request_rate"]) for run in runs] == [
        (1, None), (3, None), (None, 50.0),
    ]  # fmt: skip
    assert [run["max_concurrent_requests"] for run in runs[:2]] == [1, 3]
    tags = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: tags.append((tag, dict(attrs)))
    parser.feed(page.read_text())
    assert [tag for tag, _ in tags].count("svg") == 5
    assert not [tag for tag, attrs in tags if tag in ("script", "link") or "src" in attrs]


def test_measured_tokens_are_those_that_the_server_counts(server, tmp_path):
    def counted():
        metrics = httpx.get(f"{server.url}/metrics", headers=key).text
        return sum(
            float(line.rpartition(" ")[2])
            for line in metrics.splitlines()
            if line.startswith("sglang:generation_tokens_total")
        )

    key = {"authorization": "Bearer secret"}
    file = tmp_path / "runs.jsonl"
    before = counted()
    done = bench(server.url, *SMALL, "--warmup-requests", 0, "--output", file)

    assert done.returncode == 0, done.stderr
    [found] = map(json.loads, file.read_text().splitlines())
    assert counted() - before == found["total_output_tokens"]


@pytest.mark.parametrize(
    ("words", "key", "code", "message"),
    [
        ((), "wrong", 1, "401"),
        (("--api", "embeddings"), "secret", 1, "the first request failed"),
        (("--tokenizer", "/no/such"), "secret", 2, "/no/such"),
        (("--extra-request-body", '{"sampling_params": 1}'), "secret", 1, "first request failed"),
    ],
)
def test_what_goes_wrong_is_said(server, words, key, code, message):
    done = bench(server.url, *SMALL, "--ready-check-timeout-sec", 1, *words, key=key)

    assert message in done.stderr
    assert done.returncode == code, done.stderr


def test_a_server_that_is_not_there_is_waited_for_and_named():
    done = bench("http://127.0.0.1:9", *SMALL, "--ready-check-timeout-sec", 0.5)
    assert done.returncode == 1
    assert "no server is ready at http://127.0.0.1:9" in done.stderr


def test_requests_that_fail_are_counted_and_the_rest_continues(server, tmp_path):
    data = tmp_path / "own.jsonl"
    entries = [{"prompt": f"hello {i}", "output_tokens": 3} for i in range(4)]
    entries[2]["extra"] = {"sampling_params": {"temperature": -5}}
    data.write_text("".join(json.dumps(entry) + "\n" for entry in entries))

    done = bench(server.url, "--dataset-name", "custom", "--dataset-path", data)

    assert done.returncode == 0, done.stderr
    assert "1 failed: 400" in done.stdout
    assert "Successful requests                                    3" in done.stdout

from __future__ import annotations

import json
import random

import pytest

from sylvan.bench.compare import compare
from sylvan.bench.results import read_all
from sylvan.cli import main
from sylvan.protocol.errors import ConfigError


def result(scale, seed, tag=None):
    rng = random.Random(seed)
    ttfts = [scale * rng.uniform(0.9, 1.1) for _ in range(200)]
    rates = dict.fromkeys(
        ("request_throughput", "output_throughput", "total_throughput"), 1 / scale
    )
    return {
        "tag": tag,
        **rates,
        "ttfts": ttfts,
        "latencies": [ttft + 1.0 for ttft in ttfts],
        "output_lens": [11] * 200,
        "errors": [""] * 200,
    }


def by_name(rows):
    return {row.name: row for row in rows}


def test_a_difference_is_seen_and_its_bounds_hold_it():
    found = by_name(compare([result(1.0, 1)], [result(1.2, 2)]))

    row = found["median_ttft_ms"]
    assert row.low is not None
    assert row.high is not None
    assert row.low < 1.2 < row.high
    assert row.differs
    assert row.ratio == pytest.approx(1.2, rel=0.02)
    assert found["median_tpot_ms"].ratio == pytest.approx(1.0)


def test_the_same_is_no_difference():
    found = by_name(compare([result(1.0, 1)], [result(1.0, 2)]))
    assert not found["median_ttft_ms"].differs


@pytest.mark.slow
def test_rates_of_single_runs_have_no_bounds():
    assert by_name(compare([result(1, 1)], [result(2, 2)]))["request_throughput"].low is None
    runs = [result(1, 1), result(1.01, 2)]
    found = by_name(compare(runs, [result(2, 3), result(2.02, 4)]))["request_throughput"]
    assert found.differs


def test_failed_requests_have_no_times():
    a, b = result(1.0, 1), result(1.0, 1)
    b["errors"][0], b["ttfts"][0] = "500", 1e9
    assert by_name(compare([a], [b]))["p99_ttft_ms"].b < 2000


def test_results_without_details_are_refused():
    with pytest.raises(ConfigError, match="need details"):
        compare([{**result(1, 1)}], [{k: v for k, v in result(1, 1).items() if k != "ttfts"}])


@pytest.mark.slow
def test_the_command_compares_tagged_runs(tmp_path, capsys):
    path = tmp_path / "runs.jsonl"
    path.write_text(
        "".join(json.dumps(result(s, s, t)) + "\n" for s, t in ((1, "old"), (2, "new")))
    )
    words = ("bench", "compare", str(path), str(path), "--tag-a", "old", "--tag-b", "new")

    assert main(words) == 0

    out = capsys.readouterr().out
    assert "median_ttft_ms" in out
    assert " *" in out


@pytest.mark.parametrize("text", ["", "no JSON", '{"tag": "other"}'])
def test_files_without_results_are_refused(tmp_path, text):
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"x\.jsonl"):
        read_all(str(path), "mine")

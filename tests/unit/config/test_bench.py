from __future__ import annotations

import re
from pathlib import Path

import pytest

import sylvan
from sylvan.bench.run import check
from sylvan.config.flags import parse_flags
from sylvan.config.schema import BENCH
from sylvan.config.sources import gather_as
from sylvan.config.sweep import loads
from sylvan.protocol.errors import ConfigError

PACKAGE = Path(sylvan.__file__).parent


def read(*words, environ=None):
    parsed = parse_flags(words, tree=BENCH)
    return gather_as(BENCH, parsed.given, environ=environ or {}).config


@pytest.mark.parametrize("path", BENCH.fields)
def test_every_field_is_documented(path):
    assert BENCH.fields[path].doc.endswith(".")


def test_every_field_is_read():
    others = [PACKAGE / "cli/bench_serve.py", PACKAGE / "config/sweep.py"]
    files = [*(PACKAGE / "bench").rglob("*.py"), *others]
    text = "\n".join(path.read_text() for path in files)
    leaves = {path.rpartition(".")[2] for path in BENCH.fields}
    assert {leaf for leaf in leaves if not re.search(rf"\.{leaf}\b", text)} == set()


@pytest.mark.parametrize("name", BENCH.aliases)
def test_alias_targets_exist_and_are_not_fields(name):
    assert BENCH.aliases[name].target in BENCH.fields
    assert name not in BENCH.fields


def test_a_command_line_of_sglang_is_understood():
    config = read(
        *("--backend", "sglang-oai-chat", "--dataset-name", "generated-shared-prefix"),
        *("--request-rate", "4", "--gsp-num-groups", "3", "--max-concurrency", "8"),
        *("--goodput", "ttft:500", "tpot:50", "--flush-cache", "--lora-name", "a", "b"),
        *("--lora-request-distribution", "skewed", "--disable-stream"),
    )

    assert (config.target.api, config.data.dataset, config.data.groups) == (
        "chat",
        "shared-prefix",
        3,
    )
    assert (config.load.rate, config.load.concurrency, config.load.flush_cache) == (4.0, 8, True)
    assert config.result.goodput == {"ttft": "500", "tpot": "50"}
    assert (config.target.adapters, config.target.adapter_choice) == (("a", "b"), "zipf")
    assert not config.answer.stream
    assert read("--request-rate", "inf").load.rate is None


def test_variables_are_read_and_those_of_a_server_are_not_mixed_up():
    assert read(environ={"SYLVAN_BENCH_LOAD__RATE": "2.5"}).load.rate == 2.5
    with pytest.raises(ConfigError, match="SYLVAN_BENCH_LOAD__RAT"):
        read(environ={"SYLVAN_BENCH_LOAD__RAT": "2.5"})


def test_a_sweep_is_a_run_for_each_load():
    found = loads(read("--sweep", "1,8,2.5/s").load)
    assert [(load.concurrency, load.rate) for load in found] == [(1, None), (8, None), (None, 2.5)]
    [only] = loads(read("--concurrency", "3").load)
    assert only.concurrency == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--sweep 0", "load.sweep: expected 8"),
        ("--sweep 2/h", "load.sweep: expected 8"),
        ("--goodput x:5", "result.goodput"),
        ("--extra-request-body [1]", "answer.extra_body: expected a JSON object"),
        ("--extra-request-body {", "answer.extra_body: this is not JSON"),
        ("--use-trace-timestamps", "load.timestamps: only data.dataset trace"),
        ("--api embeddings --turns 2", "data.turns"),
        ("--output-details", "result.details needs result.file"),
        ("--output /no/such/folder/x", "result.file: /no/such/folder/x cannot be written"),
        ("--html /no/such/folder/x", "result.html: /no/such/folder/x cannot be written"),
        (
            "--dataset-name image",
            "data.dataset image needs sylvan bench serve with target.api chat",
        ),
        ("--dataset-name image --api chat --image-resolution 9x", "data.image_size: expected 4k"),
        ("--dataset-name image --api chat --image-resolution 1x8193", "of at most 8192"),
        ("--dataset-name x", "expected one of random"),
        ("--requests 0", "--requests: expected int >= 1"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_sent(words, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        check(read(*words.split()))

"""Steps of single batches: what they compute is what a scheduler has computed."""

from __future__ import annotations

import json

import numpy as np
import pytest

from sylvan.bench.batch import BatchBench, BatchShape, TimedBatch, figures
from sylvan.cli import main
from sylvan.config.sources import from_keywords, gather
from sylvan.protocol.arrays import EMPTY_IDS
from sylvan.protocol.errors import ConfigError
from sylvan.protocol.requests import GenerateRequest
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.engine.build import build_scheduler
from tests.support.random_model import write_random_model

CONTEXT = 256


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return str(write_random_model(tmp_path_factory.mktemp("model"), context_len=CONTEXT))


@pytest.fixture
def built(model_dir):
    """A model whose steps hold 48 tokens, so that prompts are divided."""
    outputs = []
    keywords = {
        "model": model_dir,
        "device": "cpu",
        "dtype": "float32",
        "cache__max_tokens": 1984,
        "cache__page_size": 16,
        "scheduler__max_batch_tokens": 48,
        "scheduler__max_running_reqs": 8,
    }
    made = build_scheduler(gather(from_keywords(keywords)).config, outputs.extend)
    yield made, outputs
    made.close()


def batches(made, **changes):
    facts = {"vocab_size": made.facts["vocab_size"], "context_len": CONTEXT} | changes
    return BatchBench(made.executor, **facts)


@pytest.mark.parametrize(
    "shape", [BatchShape(1, 5, 1), BatchShape(3, 70, 20), BatchShape(8, 17, 40)]
)
def test_batches_compute_what_a_scheduler_has_computed(built, shape):
    made, outputs = built
    timed = batches(made)
    timed.run(shape)  # another one before: nothing of it is left
    found = timed.run(shape)
    prompts = timed.prompts

    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(
            max_new_tokens=shape.output_tokens, temperature=0.0, ignore_eos=True, sampling_seed=0
        )
        rid = str(number)
        made.scheduler.add(
            GenerateRequest(rid=rid, input_ids=prompt, output_ids=EMPTY_IDS, sampling=sampling)
        )
    while made.scheduler.step():
        pass
    tokens = {str(n): [] for n in range(shape.size)}
    for output in outputs:
        tokens[output.rid] += output.token_ids
    assert [*map(list, found.tokens)] == [*tokens.values()]
    assert len(found.decode_s) == shape.output_tokens - 1
    assert min((found.prefill_s, *found.decode_s)) > 0


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        (BatchShape(9, 8, 8), "scheduler.max_running_reqs is 8"),
        (BatchShape(1, 250, 8), "more than the context of 256"),
        (BatchShape(8, 240, 16), "8 x 256 tokens take 128 pages"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(built, shape, why):
    with pytest.raises(ConfigError, match=why):
        batches(built[0]).check(shape)


def test_figures_are_medians_over_runs():
    runs = [TimedBatch(s, (s / 10, s / 20), ()) for s in (1.0, 3.0, 2.0)]

    found = figures(BatchShape(4, 10, 3), runs)

    assert found["prefill_latency"] == 2.0
    assert found["prefill_throughput"] == 20.0
    assert found["median_decode_latency"] == np.median([0.1, 0.05, 0.3, 0.15, 0.2, 0.1])
    assert found["total_latency"] == pytest.approx(2.3)
    assert "median_decode_latency" not in figures(BatchShape(1, 1, 1), [TimedBatch(1.0, (), ())])


def test_the_command_measures_each_combination(model_dir, tmp_path, capsys):
    file = tmp_path / "runs.jsonl"
    flags = ["--batch-size", "1", "3", "--input-len", "8", "20", "--output-len", "4"]
    memory = ["--dtype", "float32", "--device", "cpu", "--max-total-tokens", "2048"]

    assert main(["bench", "batch", model_dir, *memory, *flags, "--output-file", str(file)]) == 0

    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(r["batch_size"], r["input_len"]) for r in rows] == [(1, 8), (1, 20), (3, 8), (3, 20)]
    assert all(row["median_decode_throughput"] > 0 and row["origin"]["cpu"] for row in rows)
    assert len(capsys.readouterr().out.splitlines()) == 5


def test_numbers_that_are_none_are_refused(model_dir, capsys):
    assert main(["bench", "batch", model_dir, "--batch-size", "x"]) == 2
    assert "--batch-size: expected list of int >= 1, got ['x']" in capsys.readouterr().err


def test_a_load_without_a_server_is_measured(model_dir, tmp_path):
    file, page = tmp_path / "runs.jsonl", tmp_path / "page.html"
    sizes = ["--num-prompts", "5", "--random-input-len", "12", "--random-output-len", "6"]
    memory = ["--dtype", "float32", "--device", "cpu", "--max-total-tokens", "2048"]
    output = ["--random-range-ratio", "1", "--output", str(file), "--html", str(page)]

    assert main(["bench", "offline", model_dir, *memory, *sizes, *output, "--sweep", "1,2"]) == 0

    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["max_concurrency"] for row in rows] == [1, 2]
    assert [row["max_concurrent_requests"] for row in rows] == [1, 2]
    for row in rows:
        assert (row["backend"], row["completed"], row["failed"]) == ("engine", 5, 0)
        assert (row["total_input_tokens"], row["total_output_tokens"]) == (60, 30)
        assert row["config"]["data"]["requests"] == 5
    assert "<svg" in page.read_text()


def test_a_target_is_no_setting_of_an_engine(model_dir, capsys):
    assert main(["bench", "offline", model_dir, "--url", "http://x"]) == 2
    assert "--url" in capsys.readouterr().err

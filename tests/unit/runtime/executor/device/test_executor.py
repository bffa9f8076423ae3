"""The device path over a late device gives what the CPU's own path gives, and never waits early."""

from __future__ import annotations

from dataclasses import astuple
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sylvan.protocol.errors import ConfigError
from sylvan.protocol.requests import LogprobOptions
from sylvan.runtime.executor.build import build_executor
from sylvan.runtime.executor.device.parts import StepMemory
from sylvan.runtime.executor.graph_buckets import mixed_buckets
from sylvan.runtime.executor.graphs.buckets import BucketRunner
from sylvan.runtime.executor.options import LocalOptions
from sylvan.runtime.executor.parts import ModelPlan
from sylvan.runtime.models.writer import write_quantised
from sylvan.runtime.platform.find import load_kinds, open_platform
from tests.parity.serving import Serving
from tests.support.delayed import DelayedPlatform, EarlySyncError
from tests.support.on_device import OnDevice
from tests.support.random_model import write_random_model

PROMPTS = [[5, 9, 200, 31], [7] * 37, list(range(40, 150)), [9, 8, 7, 6, 5]]
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "max_new_tokens": 12}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_random_model(tmp_path_factory.mktemp("model"), context_len=256)


@pytest.fixture(scope="module")
def expected(model_dir):
    serving = Serving(model_dir)
    return {
        "greedy": serving.generate(PROMPTS),
        "sampled": serving.generate(PROMPTS, **SAMPLED),
        "penalised": serving.generate(PROMPTS, frequency_penalty=0.8, repetition_penalty=1.3),
    }


def serve(model_dir, build=None, *, overlap=True, **limits):
    return Serving(model_dir, overlap=overlap, build=build or OnDevice(), **limits)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graphs"])
def test_late_device_generates_the_same(model_dir, expected, overlap, graph):
    build = OnDevice(graph=graph)
    serving = serve(model_dir, build, overlap=overlap)

    assert serving.generate(PROMPTS) == expected["greedy"]
    assert serving.generate(PROMPTS, **SAMPLED) == expected["sampled"]
    assert (build.platform.replayed > 20) == graph
    assert build.platform.late.max_waiting > 1, "nothing was ever late"


def test_steps_with_prompts_are_graphs_too(model_dir, expected, monkeypatch):
    ran = []
    run = BucketRunner.run

    def seen(self, batch, *, graph):
        ran.append((batch.num_tokens, batch.num_reqs, graph))
        return run(self, batch, graph=graph)

    monkeypatch.setattr(BucketRunner, "run", seen)
    serving = serve(model_dir, max_batch_tokens=64)

    assert serving.generate(PROMPTS) == expected["greedy"]
    assert {(rows, requests) for rows, requests, graph in ran if graph and rows > requests} <= {
        (bucket.rows, bucket.requests)
        for bucket in mixed_buckets(64, serving.limits.max_running_reqs)
    }
    mixed = [step for step in ran if step[0] > step[1]]
    assert len(mixed) >= 3
    assert all(graph for _, _, graph in ran)


class NoCapture(DelayedPlatform):
    """Steps of the model do something that no graph can hold."""

    def graph(self):
        return SimpleNamespace(capture=self._refuse)

    def _refuse(self, work):
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nMore.")


def test_what_cannot_be_captured_runs_without_graphs(model_dir, expected, caplog):
    build = OnDevice(NoCapture())

    assert serve(model_dir, build).generate(PROMPTS) == expected["greedy"]
    assert not build.report.has_graphs
    assert "no graphs, kernels are launched one by one: CUDA error" in caplog.text
    assert "More." not in caplog.text


def test_graphs_asked_for_are_refused_where_they_cannot_be_captured(model_dir):
    sizes = {"page_size": 16, "num_pages": 20, "max_batch_tokens": 32, "max_running_reqs": 2}
    options = LocalOptions(**sizes, attention="dense", runner="graph")

    with pytest.raises(ConfigError, match=r"runner=graph: this model's steps cannot be captured"):
        build_executor(model_dir, options, platform=NoCapture())


SIZES = {"page_size": 16, "num_pages": 20, "max_batch_tokens": 64, "max_running_reqs": 4}


def test_rounding_is_refused_where_there_are_no_kernels(model_dir):
    options = LocalOptions(**SIZES, quantization="w8a8")

    with pytest.raises(ConfigError, match="quantization=w8a8: only CPUs, and GPUs with Triton"):
        build_executor(model_dir, options, platform=DelayedPlatform())


@pytest.mark.parametrize("kernels", [False, True], ids=["as numbers", "in its bits"])
def test_a_quantised_checkpoint_answers_as_its_numbers_do(
    model_dir, tmp_path, kernels, monkeypatch
):
    write_quantised(model_dir, tmp_path / "out", "fp8")
    monkeypatch.setattr(ModelPlan, "multiplier", "triton" if kernels else "none")
    build = partial(build_executor, platform=DelayedPlatform())
    options = {"attention": "dense", "dtype": "float32"}

    found = Serving(tmp_path / "out", build=build, options=options)

    expected = Serving(tmp_path / "out", options={"dtype": "float32"})
    assert found.generate(PROMPTS) == expected.generate(PROMPTS)


def test_a_step_that_is_run_again_reads_its_inputs_again(model_dir, monkeypatch):
    """A graph is captured from the second run, and must not read what the first one made."""
    kept = []
    point = StepMemory.set_bucket_views

    def seen(self, bucket):
        kept.append((self, bucket))
        return point(self, bucket)

    monkeypatch.setattr(StepMemory, "set_bucket_views", seen)
    serve(model_dir)
    for memory, bucket in kept:
        batch = point(memory, bucket)
        ids, feed = (
            memory.inputs(*astuple(bucket)).device[n] for n in ("input_ids", "in_flight_slots")
        )
        for number in (3, 8):
            ids[: bucket.rows], feed[: bucket.rows] = number, -1
            memory.resolve_in_flight(batch)
            assert batch.input_ids_T.tolist() == [number] * bucket.rows


def test_a_platform_without_delay_generates_the_same(model_dir, expected):
    build = OnDevice(open_platform(load_kinds(())["cpu"]), graph=False)

    assert serve(model_dir, build).generate(PROMPTS) == expected["greedy"]


def test_penalties_count_on_the_device(model_dir, expected):
    serving = serve(model_dir)

    found = serving.generate(PROMPTS, frequency_penalty=0.8, repetition_penalty=1.3)

    assert found == expected["penalised"]
    assert found != expected["greedy"]


def test_small_steps_and_little_memory_change_nothing(model_dir):
    tight = {"max_batch_tokens": 24, "max_running_reqs": 3, "pages": 9, "conservativeness": 0.0}
    serving = serve(model_dir, **tight)
    asked = {"max_new_tokens": 60, "frequency_penalty": 0.1}

    assert serving.generate(PROMPTS[:2], **asked) == Serving(model_dir).generate(
        PROMPTS[:2], **asked
    )
    assert serving.scheduler.load().retractions > 0


def test_bias_and_early_stops_are_kept(model_dir, expected):
    first, second = (tokens[0] for tokens in expected["greedy"][:2])
    serving, plain = serve(model_dir), Serving(model_dir)
    asked = {
        "logit_bias": {str(first): -100.0, "3": 2.0},
        "stop_token_ids": (second,),
        "min_new_tokens": 4,
    }

    found = serving.generate(PROMPTS, **asked)

    assert found == plain.generate(PROMPTS, **asked)
    assert found[0][0] != first
    assert second not in found[1][:4]


def test_log_probabilities_are_those_of_the_cpu(model_dir):
    options = LogprobOptions(top=3, start=2, token_ids=(4, 5))
    found = []
    for serving in (Serving(model_dir), serve(model_dir)):
        rid = serving.add(PROMPTS[1], logprobs=options, temperature=0.8)
        serving.run()
        found.append(serving.outputs[rid])
    for mine, theirs in zip(*found, strict=True):
        for name in ("logprobs", "prompt_logprobs"):
            a, b = getattr(mine, name), getattr(theirs, name)
            assert (a is None) == (b is None)
            if a is None:
                continue
            for part in ("token_ids", "logprobs", "top_ids", "top_logprobs", "chosen_logprobs"):
                np.testing.assert_allclose(getattr(a, part), getattr(b, part), atol=2e-5)


def test_processors_of_others_may_read_logits(model_dir):
    def forbid_all_but_seven(logits, batch):
        allowed = logits[:, 7].tolist()
        logits.fill_(float("-inf"))
        logits[:, 7] = torch.tensor(allowed)

    serving = serve(model_dir, OnDevice(custom=(forbid_all_but_seven,)))

    assert serving.generate([[1, 2, 3]], max_new_tokens=3) == [[7, 7, 7]]


def test_rows_without_a_possible_token_fail_alone(model_dir):
    def forbid_odd(logits, batch):
        logits[batch.slots == 1] = float("-inf")

    serving = serve(model_dir, OnDevice(custom=(forbid_odd,)))
    rids = [serving.add(p, max_new_tokens=2) for p in PROMPTS[:2]]
    serving.run()
    ends = {serving.finish[rid].type for rid in rids}

    assert ends == {"length", "abort"}
    assert any("no token is valid" in str(serving.finish[r].message) for r in rids)


def test_launching_does_not_wait(model_dir):
    build = OnDevice()
    serving = serve(model_dir, build)
    launch = serving.executor.launch

    def guarded(batch):
        with build.platform.unsynced():
            return launch(batch)

    serving.executor.launch = guarded

    assert len(serving.generate(PROMPTS, max_new_tokens=4)) == len(PROMPTS)


def test_an_op_that_waits_is_found_out(model_dir):
    build = OnDevice(graph=False)
    serving = serve(model_dir, build)
    model = serving.executor._worker._backend._parts.runner._model
    embed = model.embed

    def curious(batch):
        assert int(batch.input_ids_T[0]) >= 0
        return embed(batch)

    model.embed = curious
    serving.add([1, 2, 3])
    serving.run()

    (finish,) = serving.finish.values()
    assert finish.type == "abort"
    assert "waits for the device" in finish.message


def test_reading_before_the_event_gives_nothing(model_dir):
    """The fake's purpose: results do not exist until they are waited for."""
    build = OnDevice()
    serving = serve(model_dir, build)
    serving.add([1, 2, 3])
    seen = []
    launch = serving.executor.launch

    def watched(batch):
        step = launch(batch)
        seen.append((step.done(), step.sample.ids.tolist() if step.sample else None))
        return step

    serving.executor.launch = watched
    serving.run()

    assert (False, [0]) in seen
    assert issubclass(EarlySyncError, RuntimeError)
    assert isinstance(build.platform, DelayedPlatform)

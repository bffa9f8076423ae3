from __future__ import annotations

import json

import pytest
import torch

from sylvan.kernels import describe
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.executor import build
from sylvan.runtime.executor.attention_choice import load_attention
from sylvan.runtime.executor.build import build_executor
from sylvan.runtime.executor.facts import read_facts
from sylvan.runtime.executor.graphs import layers
from sylvan.runtime.executor.options import LocalOptions
from sylvan.runtime.models.safetensors import Checkpoint
from tests.parity.checkpoints import make


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    make("llama-tied-bias", path)
    return path


native = pytest.mark.skipif(describe().variant is None, reason="kernels are not compiled")


def options(**changes) -> LocalOptions:
    sizes = {"page_size": 16, "num_pages": 9, "max_batch_tokens": 32, "max_running_reqs": 2}
    return LocalOptions(**sizes | changes)


def test_facts_need_no_weights(model_dir):
    facts = read_facts(model_dir)

    assert facts.weight_bytes == Checkpoint(model_dir).num_bytes
    assert facts.kv_bytes_per_token == 3 * 2 * 2 * 24 * 4
    assert (facts.vocab_size, facts.context_len, facts.eos_ids) == (199, 256, (2,))
    assert read_facts(model_dir, "bfloat16").weight_bytes == facts.weight_bytes // 2


@native
@pytest.mark.parametrize("kind", ["int8", "fp8_e4m3", "fp8_e5m2"])
def test_pages_of_bytes_take_a_byte_a_number_and_a_scale_a_head(model_dir, kind):
    _, facts = build_executor(model_dir, options(kv_dtype=kind))

    assert facts.runner.startswith("program")
    assert facts.kv_bytes_per_token == 3 * 2 * 2 * (24 + 4)


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("changes", [{"runner": "eager"}, {"attention": "torch"}])
def test_levels_are_refused_where_tensors_compute(model_dir, changes, kind):
    with pytest.raises(ConfigError, match=rf"cache\.dtype={kind}"):
        build_executor(model_dir, options(kv_dtype=kind, **changes))


def test_generation_config_knows_the_ends(model_dir, tmp_path):
    (tmp_path / "config.json").write_text((model_dir / "config.json").read_text())
    generation = tmp_path / "generation_config.json"

    generation.write_text(json.dumps({"eos_token_id": [2, 9]}))
    assert read_facts(tmp_path).eos_ids == (2, 9)
    generation.write_text("{}")
    assert read_facts(tmp_path).eos_ids == (2,)
    generation.write_text('{"eos_token_id": "x"}')
    with pytest.raises(ConfigError, match="eos_token_id"):
        read_facts(tmp_path)
    generation.write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_facts(tmp_path)


def test_progress_reaches_the_end(model_dir):
    seen: list[tuple[int, int]] = []

    build_executor(model_dir, options(), progress=lambda *now: seen.append(now))

    assert seen[-1][0] == seen[-1][1] == Checkpoint(model_dir).num_bytes


def test_dummy_weights_need_no_files(model_dir, tmp_path):
    (tmp_path / "config.json").write_text((model_dir / "config.json").read_text())

    _, facts = build_executor(tmp_path, options(load_format="dummy", runner="eager"))

    assert facts.runner == "eager"


@native
def test_auto_falls_back_to_tensors_with_a_reason(model_dir, caplog, monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    _, facts = build_executor(model_dir, options(page_size=4))

    assert facts.runner.startswith("eager (native linears, ")
    assert "multiple of 16" in caplog.text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param(
            {"runner": "program", "page_size": 4},
            "runner program cannot be used: .*multiple of 16",
            marks=native,
        ),
        ({"runner": "program", "attention": "reference"}, "attention is set to 'reference'"),
        ({"runner": "eager", "attention": "native"}, "part of runner program only"),
        ({"attention": "refrence"}, "did you mean 'reference'"),
        ({"dtype": "int9"}, "dtype must be auto or one of float32"),
    ],
)
def test_what_cannot_be_honoured_is_refused(model_dir, changes, words):
    with pytest.raises(ConfigError, match=words):
        build_executor(model_dir, options(**changes))


@native
@pytest.mark.parametrize("runner", ["auto", "program", "eager"])
@pytest.mark.parametrize(
    ("changes", "words"),
    [({"page_size": 4}, "multiple of 16"), ({"attention": "torch"}, "attention is set to 'torch'")],
)
def test_deterministic_refuses_what_tensors_would_compute(model_dir, runner, changes, words):
    reason = words if runner != "eager" else "runner is set to eager"
    with pytest.raises(ConfigError, match=f"deterministic=true cannot be kept: .*{reason}") as why:
        build_executor(model_dir, options(runner=runner, deterministic=True, **changes))
    assert "\n" not in str(why.value)


@native
def test_facts_say_whether_bits_depend_on_the_batch(model_dir):
    assert build_executor(model_dir, options(deterministic=True))[1].exact
    assert not build_executor(model_dir, options(runner="eager"))[1].exact


def test_missing_kernels_leave_the_tensors(model_dir, monkeypatch, caplog):
    def missing():
        raise build.LibraryMissing("no compiler")

    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setattr(build, "load_library", missing)
    monkeypatch.setattr(layers, "load_library", missing)

    assert build_executor(model_dir, options())[1].runner == "eager"
    assert "no compiler" in caplog.text


def test_attention_for_another_device_is_refused():
    with pytest.raises(ConfigError, match="does not run on xpu"):
        load_attention("native", torch.device("xpu"))

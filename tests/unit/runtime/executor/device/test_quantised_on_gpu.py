"""Quantised checkpoints on a real GPU give what the CPU gives; run with `--device cuda`."""

from __future__ import annotations

import numpy as np
import pytest

from sylvan.config.checkpoint import model_dir
from sylvan.kernels.matmul.weights import CodedWeight
from sylvan.protocol.errors import ConfigError
from sylvan.protocol.requests import LogprobOptions
from sylvan.runtime.executor.build import build_executor
from sylvan.runtime.executor.options import ExecutorParts
from sylvan.runtime.features.standard_workers import STANDARD_WORKERS
from sylvan.runtime.layers.linear import Linear
from sylvan.runtime.platform.find import load_kinds, open_platform
from tests.parity.serving import Serving
from tests.support.chosen import device_name
from tests.support.quantised_models import write_plain_model, write_quantised_model

pytestmark = pytest.mark.gpu

PROMPTS = [[5, 9, 200, 31], [7] * 37, list(range(40, 150)), [9, 8, 7, 6, 5]]
SCORED = [list(range(60, 75)), list(range(40, 150))]  # few rows and many take different kernels
CASES = (
    "gptq",
    "gptq-order-asym",
    "gptq-8",
    "awq",
    "fp8-tensor",
    "fp8-rows",
    "fp8-block",
    "modelopt-nvfp4",
    "quark-mxfp4",
    "mxfp8",
    "bnb-nf4",
    "gguf Q4_0",
    "gguf Q4_K",
    "gguf Q6_K",
    "gguf Q8_0",
)


@pytest.fixture(scope="module")
def gpu():
    return open_platform(load_kinds(())[device_name()])


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def serve(path, gpu, **options):
    def build(path, local):
        return build_executor(path, local, parts=ExecutorParts(STANDARD_WORKERS), platform=gpu)

    return Serving(
        path,
        overlap=True,
        runner="graph",
        options={"device": gpu.facts.name} | options,
        build=build,
    )


def served_here(serving) -> list[CodedWeight]:
    """Matrices in the memory of the device that are quantised there."""
    model = serving.executor._worker._backend._parts.runner._model
    weights = [module.weight for module in model.modules() if isinstance(module, Linear)]
    return [weight for weight in weights if isinstance(weight, CodedWeight) and weight.q.is_cuda]


def prompt_logprobs(serving, prompt) -> np.ndarray:
    rid = serving.add(prompt, logprobs=LogprobOptions(start=1))
    serving.run()
    parts = [out.prompt_logprobs for out in serving.outputs[rid] if out.prompt_logprobs]
    return np.concatenate([part.logprobs for part in parts])[1:]  # the first has none


@pytest.mark.parametrize("case", CASES)
def test_checkpoints_give_what_the_cpu_gives(tmp_path, gpu, case):
    if case.startswith("gguf"):
        pytest.importorskip("gguf")
    path = model_dir(str(write_quantised_model(tmp_path / "model", case)))
    exact = Serving(path, options={"dtype": "float32"})
    rounded = Serving(path, options={"dtype": "bfloat16"})

    whole = serve(path, gpu, dtype="float32")
    half = serve(path, gpu, dtype="bfloat16")

    assert whole.generate(PROMPTS) == exact.generate(PROMPTS)
    assert len(served_here(half)) >= 8
    for prompt in SCORED:
        wanted = prompt_logprobs(exact, prompt)
        usual = np.abs(prompt_logprobs(rounded, prompt) - wanted).max()
        assert 0 < np.abs(prompt_logprobs(half, prompt) - wanted).max() < 3 * usual
    decoded = half.generate(PROMPTS)
    assert [len(tokens) for tokens in decoded] == [16] * len(PROMPTS)


@pytest.mark.parametrize("format_", ["w4a16", "fp8", "fp8-block", "mxfp4", "nvfp4"])
def test_matrices_are_rounded_while_loading(tmp_path, gpu, format_):
    path = write_plain_model(tmp_path / "model")
    exact = Serving(path, options={"dtype": "float32", "quantization": format_})

    whole = serve(path, gpu, dtype="float32", quantization=format_)

    assert whole.generate(PROMPTS) == exact.generate(PROMPTS)
    assert len(served_here(whole)) >= 8


@pytest.mark.parametrize("case", ["fp8-tensor", "fp8-rows", "fp8-block"])
def test_activations_are_rounded_to_fp8(tmp_path, gpu, case):
    path = write_quantised_model(tmp_path / "model", case)
    options = {"dtype": "bfloat16", "fp8_activations": True}
    if gpu.facts.float8_of(gpu.chip) != "float8_e4m3fn":
        with pytest.raises(ConfigError, match="no kernels for 8-bit floats"):
            serve(path, gpu, **options)
        return
    plain = serve(path, gpu, dtype="bfloat16")
    small = serve(path, gpu, **options)

    assert all(weight.fp8_inputs for weight in served_here(small))
    for prompt in SCORED:
        away = np.abs(prompt_logprobs(small, prompt) - prompt_logprobs(plain, prompt))
        assert 0 < away.max() < 0.5
    assert [len(tokens) for tokens in small.generate(PROMPTS)] == [16] * len(PROMPTS)


def test_activations_of_other_matrices_are_not(tmp_path, gpu):
    path = write_quantised_model(tmp_path / "model", "gptq")

    with pytest.raises(ConfigError, match="no matrix of the model is FP8"):
        serve(path, gpu, fp8_activations=True)

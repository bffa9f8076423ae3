"""Families of which programs hold a part, and layers by native kernels alone, as in a server."""

from __future__ import annotations

import numpy as np
import pytest
import transformers

from sylvan.kernels.api import Unsupported
from sylvan.kernels.native.library import describe
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.executor import build
from tests.parity import families
from tests.parity.checkpoints import FAMILIES, SHAPE, VOCAB, write
from tests.parity.compare import EVERYTHING, compare
from tests.parity.rare import ALL
from tests.parity.serving import Serving

pytestmark = pytest.mark.skipif(describe().variant is None, reason="kernels are not compiled")

ATTENDING, LINEARS = "eager (native linears and attention, ", "eager (native linears, "
PARTIAL = {"longcat-flash": "ZeroMoE"}
RECURRENT = (
    *("bamba", "falcon-mamba", "granite4", "jamba", "lfm2", "lfm2-moe", "mamba", "mamba2"),
    *("minimax", "qwen3-next", "qwen3.5", "qwen3.5-moe", "recurrent-gemma", "rwkv"),
    *("kimi-linear", "zamba"),
)
VARIANTS = ("apertus", "hunyuan", "ministral3", "llama4", "bloom", "mpt", "deepseek-v4")
REFUSED = {
    "llama-tied-bias": ATTENDING,
    "gemma2": ATTENDING,
    "gpt-oss": ATTENDING,
    "opt": ATTENDING,
    "glm4": ATTENDING,
    "deepseek-v3": LINEARS,
    "lfm2": ATTENDING,
    "qwen3-next": ATTENDING,
    "mamba2": LINEARS,
    "apertus": ATTENDING,
    "hunyuan": ATTENDING,
    "ministral3": ATTENDING,
    "llama4": LINEARS,
    "bloom": LINEARS,
}


@pytest.fixture(autouse=True)
def as_in_a_server(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")


@pytest.mark.slow
@pytest.mark.parametrize("family", PARTIAL)
def test_a_partial_program_equals_transformers(family, tmp_path):
    """Alone, batched, chunked, from the prefix cache and after preemption."""
    model = write(ALL[family](), len(family), tmp_path)

    found = compare(tmp_path, model, new=32)

    assert found.runner.startswith("program (")
    assert found.runner.endswith(f", PyTorch in {PARTIAL[family]}")
    assert not found.modes
    assert found.excess <= 1


@pytest.mark.slow
@pytest.mark.parametrize("family", RECURRENT)
def test_recurrent_layers_are_in_programs(family, tmp_path):
    model = write(ALL[family](), len(family), tmp_path)

    found = compare(tmp_path, model, new=24)

    assert found.runner.startswith("program (")
    assert "PyTorch" not in found.runner
    assert not found.modes
    assert found.excess <= 1


@pytest.mark.slow
@pytest.mark.parametrize("family", VARIANTS)
def test_variants_of_attention_and_activations_are_in_programs(family, tmp_path):
    model = write(ALL[family](), len(family), tmp_path)

    found = compare(tmp_path, model, new=32)

    assert found.runner.startswith("program (")
    assert "PyTorch" not in found.runner
    assert not found.modes
    assert found.excess <= 1


@pytest.mark.slow
@pytest.mark.parametrize("family", REFUSED)
def test_layers_equal_transformers_where_tracing_is_refused(family, tmp_path, monkeypatch):
    """Norms, blocks, heads and embeddings of many kinds, which programs usually hold."""

    def refuse(plan):
        raise Unsupported("for this test")

    monkeypatch.setattr(build, "_with_traced", refuse)
    model = write((FAMILIES | ALL)[family](), len(family), tmp_path)

    found = compare(tmp_path, model, new=32)

    assert found.runner.startswith(REFUSED[family])
    assert not found.modes
    assert found.excess <= 1


@pytest.mark.parametrize(
    ("options", "runner"),
    [
        ({"attention": "torch"}, LINEARS),
        ({"dtype": "bfloat16", "kv_dtype": "fp8_e4m3"}, "program ("),
        ({"dtype": "bfloat16"}, "program ("),
        ({"dtype": "float16"}, "eager"),
        ({"page_size": 8}, LINEARS),
    ],
)
def test_kernels_give_way_to_what_was_chosen(options, runner, tmp_path):
    write(ALL["lfm2"](), 3, tmp_path)
    page = options.pop("page_size", 16)

    serving = Serving(tmp_path, runner="auto", page_size=page, options=options)

    assert serving.facts.runner.startswith(runner)
    assert serving.facts.exact == runner.startswith("program")
    assert serving.generate([[5, 6, 7]], max_new_tokens=4)


def test_a_partial_program_is_not_deterministic(tmp_path):
    write(ALL["longcat-flash"](), 3, tmp_path)

    with pytest.raises(ConfigError, match="deterministic=true cannot be kept: PyTorch computes"):
        Serving(tmp_path, runner="auto", options={"deterministic": True})


def test_runner_eager_is_pytorch_alone(tmp_path):
    write(ALL["lfm2"](), 3, tmp_path)

    assert Serving(tmp_path, runner="eager").facts.runner == "eager"


def test_without_calm_threads_it_is_pytorch_alone(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY")
    write(ALL["longcat-flash"](), 3, tmp_path)

    serving = Serving(tmp_path, runner="auto")

    assert serving.facts.runner == "eager"
    assert serving.generate([[5, 6, 7]], max_new_tokens=4)


@pytest.mark.parametrize("quantization", ["w8a8", "w4a8"])
def test_quantised_layers_compute_what_their_definition_does(quantization, tmp_path):
    config = transformers.ApertusConfig(**SHAPE | {"intermediate_size": 128})
    write(config, 3, tmp_path)
    prompts = [list(range(20, 40)), [7, 8, 9]]

    def rows(runner: str, quantised: str | None) -> np.ndarray:
        serving = Serving(tmp_path, runner=runner, options={"quantization": quantised})
        rids = [serving.add(p, logprobs=EVERYTHING, max_new_tokens=1) for p in prompts]
        serving.run()
        return np.stack([serving.outputs[rid][0].logprobs.chosen_logprobs[0] for rid in rids])

    plain, defined, native = (
        rows("eager", None),
        rows("eager", quantization),
        rows("auto", quantization),
    )

    # Rounding may move a number to the next of its levels; quantising itself does far more.
    assert np.abs(native - defined).max() < 0.02 * np.abs(defined - plain).max()


def test_a_prompt_in_company_keeps_its_answer(tmp_path):
    write(families.FAMILIES["hunyuan-moe"](), 6, tmp_path)
    rng = np.random.default_rng(4)
    prompts = [rng.integers(4, VOCAB, n).tolist() for n in (3, 30, 17)]
    serving = Serving(tmp_path, runner="auto")

    together = serving.generate(prompts, max_new_tokens=12)
    alone = [Serving(tmp_path, runner="auto").generate([p], max_new_tokens=12)[0] for p in prompts]

    assert together == alone


def test_experts_are_counted(tmp_path):
    write(families.FAMILIES["hunyuan-moe"](), 6, tmp_path)
    serving = Serving(tmp_path, runner="auto")

    serving.generate([[5, 6, 7]], max_new_tokens=4)

    loads = list(serving.facts.expert_load.values())
    assert len(loads) == 2
    assert {int(load.sum()) for load in loads} == {2 * 6}, "two experts for each of six rows"

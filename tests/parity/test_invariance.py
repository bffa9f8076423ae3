"""The same bits however a request was computed: step programs of many families, mode by mode."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import transformers

from sylvan.kernels.native.library import describe
from sylvan.protocol.requests import LogprobOptions
from tests.parity import families
from tests.parity.checkpoints import FAMILIES, SHAPE, VOCAB, make, write
from tests.parity.published_models import PUBLISHED
from tests.parity.rare import RARE
from tests.parity.serving import Serving

pytestmark = pytest.mark.skipif(describe().variant is None, reason="kernels are not compiled")

EVERYTHING = LogprobOptions(token_ids=tuple(range(VOCAB)))
NEW = 24
OPTIONS = {"options": {"dtype": "bfloat16"}, "runner": "program"}


@dataclass(frozen=True)
class Life:
    """A request's tokens, and every log probability of every step."""

    tokens: list[int]
    logprobs: np.ndarray


def lives(serving: Serving, prompts, **sampling) -> list[Life]:
    rids = [
        serving.add(prompt, logprobs=EVERYTHING, max_new_tokens=NEW, **sampling)
        for prompt in prompts
    ]
    serving.run()
    return [
        Life(
            serving.tokens[rid],
            np.concatenate([o.logprobs.chosen_logprobs for o in serving.outputs[rid]]),
        )
        for rid in rids
    ]


@pytest.fixture(scope="module", params=["llama", "mistral", "qwen3"])
def model_dir(request, tmp_path_factory):
    assert request.param in FAMILIES
    path = tmp_path_factory.mktemp(request.param)
    make(request.param, path)
    return path


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(5)
    return [rng.integers(4, VOCAB, n).tolist() for n in (33, 2, 50, 16)]


@pytest.fixture(scope="module")
def wide_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("wide")  # inputs of all matrices divide into groups
    write(transformers.LlamaConfig(**SHAPE | {"intermediate_size": 128}), 5, path)
    return path


@pytest.fixture(scope="module")
def wide_heads_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("heads")
    write(transformers.Qwen3Config(**SHAPE | {"head_dim": 32}), 5, path)
    return path


@pytest.fixture(scope="module", params=["gpt-oss", "qwen2-moe", "dots1", "deepseek-v3"])
def experts_dir(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    write(families.FAMILIES[request.param](), 5, path)
    return path


@pytest.fixture(scope="module")
def wide_experts_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("experts")  # inputs of all matrices divide into groups
    shape = SHAPE | families.EXPERTS | {"moe_intermediate_size": 32, "head_dim": 16}
    write(transformers.Qwen3MoeConfig(**shape), 5, path)
    return path


@pytest.mark.parametrize(
    ("temperature", "dtype"), [(0.0, "bfloat16"), (1.0, "bfloat16"), (1.0, "float32")]
)
def test_every_mode_gives_the_same_bits(model_dir, prompts, temperature, dtype):
    compare_modes(model_dir, prompts, temperature, {"dtype": dtype})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "fp8_e4m3", "fp8_e5m2"])
def test_every_mode_gives_the_same_bits_with_pages_of_bytes(model_dir, prompts, kind):
    compare_modes(model_dir, prompts, 1.0, OPTIONS["options"] | {"kv_dtype": kind})


def test_every_mode_gives_the_same_bits_with_int4_pages(wide_heads_dir, prompts):
    compare_modes(wide_heads_dir, prompts, 1.0, OPTIONS["options"] | {"kv_dtype": "int4"})


@pytest.mark.parametrize("quantization", ["w8a8", "w4a8"])
def test_every_mode_gives_the_same_bits_quantised(wide_dir, prompts, quantization):
    options = OPTIONS["options"] | {"quantization": quantization}
    compare_modes(wide_dir, prompts, 1.0, options)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_experts_give_the_same_bits_in_every_mode(experts_dir, prompts, dtype):
    compare_modes(experts_dir, prompts, 1.0, {"dtype": dtype})


@pytest.mark.parametrize("quantization", ["w8a8", "w4a8"])
def test_quantised_experts_give_the_same_bits_in_every_mode(
    wide_experts_dir, prompts, quantization
):
    options = OPTIONS["options"] | {"quantization": quantization}
    compare_modes(wide_experts_dir, prompts, 1.0, options)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["mistral4", "phi3-small"])
def test_published_families_give_the_same_bits_in_every_mode(name, dtype, prompts, tmp_path):
    PUBLISHED[name].make(5).write(tmp_path)

    compare_modes(tmp_path, prompts, 1.0, {"dtype": dtype})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(("deepseek-v32", "bfloat16"), ("glm-moe-dsa", "float32")),
        *(("deepseek-v4", "bfloat16"), ("deepseek-v4", "float32")),
    ],
)
def test_chosen_tokens_give_the_same_bits_in_every_mode(name, dtype, prompts, tmp_path):
    write(RARE[name](), 5, tmp_path)

    compare_modes(tmp_path, prompts, 1.0, {"dtype": dtype})


def compare_modes(model_dir, prompts, temperature, options):
    """Alone, cached, batched, chunked, on other pages, with more threads, preempted: all equal."""
    sampling = {"temperature": temperature, "top_p": 0.9, "sampling_seed": 3}
    settings = {"options": options, "runner": "program"}
    serving = Serving(model_dir, **settings)
    alone = [lives(serving, [prompt], **sampling)[0] for prompt in prompts]
    modes = {
        "cached": lives(serving, prompts, **sampling),
        "batched": lives(Serving(model_dir, **settings), prompts, **sampling),
        "chunked": lives(Serving(model_dir, chunk_tokens=7, **settings), prompts, **sampling),
        "other pages": lives(Serving(model_dir, page_size=64, **settings), prompts, **sampling),
    }
    threads = {"options": options | {"threads": 3}, "runner": "program"}
    modes["three threads"] = lives(Serving(model_dir, **threads), prompts, **sampling)
    tight = Serving(
        model_dir, pages=11, conservativeness=0.1, overlap=True, **settings, preempt_every=23
    )
    modes["preempted, overlapped"] = lives(tight, prompts, **sampling)
    tight.close()

    assert tight.scheduler.load().retractions > 0
    assert serving.scheduler.load().cached_prompt_tokens > 0
    for mode, found in modes.items():
        for a, b in zip(alone, found, strict=True):
            assert a.tokens == b.tokens, mode
            assert np.array_equal(a.logprobs, b.logprobs), mode

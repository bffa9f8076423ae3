"""Models of transformers whose matrix products and attention are native, as on a CPU server."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from sylvan.kernels.native.library import describe
from sylvan.runtime.executor.graphs.hf_acceleration import use_kernels
from sylvan.runtime.executor.graphs.native_modules import NativeExperts
from sylvan.runtime.layers.build import Build
from sylvan.runtime.models import registry
from sylvan.runtime.models.fallback import TransformersModel
from tests.parity.checkpoints import SHAPE, write
from tests.parity.compare import EVERYTHING, compare
from tests.parity.families import DENSE, EXPERT, FALLBACK
from tests.parity.rare import RARE
from tests.parity.serving import Serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(describe().variant is None, reason="kernels are not compiled"),
]
KERNELS = "eager (native linears and attention"
WHAT = {
    "rotary, grouped heads": lambda: transformers.LlamaConfig(**SHAPE),
    "tied, windows, soft caps": DENSE["gemma2"],
    "sinks": EXPERT["gpt-oss"],
    "norms of heads": FALLBACK["cohere-qk-norm"],
    "joined projections": FALLBACK["persimmon"],
    "learned positions": DENSE["opt"],
    "scaled embedding": RARE["bart"],
    "heads twice as wide": RARE["diffllama"],
    "experts": EXPERT["qwen3-moe"],
    "experts, all of them chosen from": EXPERT["olmoe"],
    "experts beside a shared one": EXPERT["deepseek-v3"],
    "experts that nothing else serves": RARE["laguna"],
}
EXPERTS = [name for name in WHAT if name.startswith("experts")]
ROUTED = EXPERTS[:-1]  # of the last one PyTorch computes more, such as its gates of attention


@pytest.fixture(autouse=True)
def as_in_a_server(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")


@pytest.mark.parametrize("what", WHAT)
def test_it_equals_transformers(what, tmp_path, monkeypatch):
    config = WHAT[what]()
    model = write(config, len(what), tmp_path)
    monkeypatch.delitem(registry.MODELS, model.config.architectures[0], raising=False)

    found = compare(tmp_path, model, new=32)

    assert found.runner.startswith(KERNELS)
    assert not found.modes
    assert found.excess <= 1


@pytest.mark.parametrize("what", EXPERTS)
def test_experts_are_native_and_in_memory_once(what, tmp_path, monkeypatch):
    architecture = write(WHAT[what](), 5, tmp_path).config.architectures[0]
    monkeypatch.delitem(registry.MODELS, architecture, raising=False)
    build = Build(dtype=torch.float32, length=64, device=torch.device("cpu"))
    model = TransformersModel(registry.load_config(tmp_path), build)
    model.load(tmp_path)

    native = use_kernels(model, torch.float32, 1, None)

    assert native is not None
    experts = {name for name, part in model.inner.named_modules() if type(part) is NativeExperts}
    assert experts == set(model.chosen)
    assert experts
    assert not [part for part in model.parameters() if part.dim() == 3]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("what", ROUTED)
def test_answers_of_experts_do_not_depend_on_company(what, dtype, tmp_path, monkeypatch):
    architecture = write(WHAT[what](), 6, tmp_path).config.architectures[0]
    monkeypatch.delitem(registry.MODELS, architecture, raising=False)
    serving = Serving(tmp_path, runner="auto", options={"dtype": dtype})
    prompts = [[5 + i, 9, *range(20, 30 + 3 * i)] for i in range(6)]

    def answers(prompts):
        rids = [serving.add(p, logprobs=EVERYTHING, max_new_tokens=8) for p in prompts]
        serving.run()
        return [[out.logprobs.chosen_logprobs for out in serving.outputs[rid]] for rid in rids]

    together = answers(prompts)
    serving.scheduler.flush_cache()
    alone = [answers([prompt])[0] for prompt in prompts]

    for some, other in zip(together, alone, strict=True):
        assert all(map(np.array_equal, some, other))


@pytest.mark.parametrize(
    ("options", "runner"),
    [
        ({"attention": "torch"}, "eager (native linears,"),
        ({"dtype": "bfloat16", "kv_dtype": "fp8_e4m3"}, "eager (native linears,"),
        ({"dtype": "bfloat16"}, KERNELS),
        ({"page_size": 8}, "eager (native linears,"),
    ],
)
def test_native_attention_gives_way_to_what_was_chosen(options, runner, tmp_path):
    write(FALLBACK["persimmon"](), 3, tmp_path)
    page = options.pop("page_size", 16)

    serving = Serving(tmp_path, runner="auto", page_size=page, options=options)

    assert serving.facts.runner.startswith(runner)
    assert serving.generate([[5, 6, 7]], max_new_tokens=4)

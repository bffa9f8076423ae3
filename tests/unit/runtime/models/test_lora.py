"""Adapters that `peft` wrote are merged as `peft` merges them, and what does not fit is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from sylvan.cli.main import main
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.lora import read_adapter
from sylvan.runtime.models.lora_merge import open_merged
from tests.parity.checkpoints import write
from tests.parity.families import DENSE, EXPERT
from tests.parity.serving import Serving
from tests.support.updates import PROMPTS

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")  # peft's own, about transformers and torch

LLAMA, GPT2 = "smollm3", "gpt2"
ADAPTERS = {
    "attention": (LLAMA, {"target_modules": ["q_proj", "v_proj"]}),
    "all-linear": (LLAMA, {"target_modules": "all-linear", "r": 3, "lora_alpha": 16}),
    "pattern": (LLAMA, {"target_modules": r".*layers\.[01]\..*(up|down)_proj"}),
    "rslora": (LLAMA, {"target_modules": ["o_proj"], "use_rslora": True}),
    "dora": (LLAMA, {"target_modules": ["q_proj", "down_proj"], "use_dora": True}),
    "mixed ranks": (
        LLAMA,
        {
            "target_modules": ["q_proj", "k_proj"],
            "rank_pattern": {"layers.0.self_attn.q_proj": 2},
            "alpha_pattern": {"k_proj": 5},
        },
    ),
    "embedding": (LLAMA, {"target_modules": ["embed_tokens", "q_proj"]}),
    "whole norm": (LLAMA, {"target_modules": ["q_proj"], "modules_to_save": ["norm"]}),
    "experts": (
        "qwen3-moe",
        {"target_parameters": [f"mlp.experts.{part}_proj" for part in ("gate_up", "down")]},
    ),
    "experts of other names": ("mixtral", {"target_parameters": ["mlp.experts.gate_up_proj"]}),
    "turned": (GPT2, {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}),
}


def make(folder: Path, family: str, **fields: object):
    """A model, an adapter beside it with random numbers, and the merged state by peft."""
    write((DENSE | EXPERT)[family](), 1, folder / "base")
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"} | fields)
    adapted = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=generator) * 0.05
            parameter.data = parameter.data * ("magnitude" in name or "norm" in name) + noise
    adapted.save_pretrained(folder / "adapter")
    return adapted.merge_and_unload()


@pytest.mark.parametrize("name", ADAPTERS)
def test_merged_as_peft_merges(name, tmp_path):
    family, fields = ADAPTERS[name]
    merged = make(tmp_path, family, **fields)

    words = [str(tmp_path / part) for part in ("adapter", "base", "out")]
    assert main(["lora", "merge", *words]) == 0

    merged.save_pretrained(tmp_path / "theirs")
    found, want = (load_file(tmp_path / part / "model.safetensors") for part in ("out", "theirs"))
    base = load_file(tmp_path / "base" / "model.safetensors")
    assert found.keys() == base.keys()
    changed = [n for n in found if not torch.equal(found[n], base[n])]
    assert changed
    for tensor in found:
        torch.testing.assert_close(found[tensor], want[tensor], rtol=1e-5, atol=1e-6)


def test_what_is_written_is_served(tmp_path):
    merged = make(tmp_path, LLAMA, target_modules="all-linear")
    assert main(["lora", "merge", *(str(tmp_path / p) for p in ("adapter", "base", "out"))]) == 0
    merged.save_pretrained(tmp_path / "theirs")

    answers = [Serving(tmp_path / p, runner="auto").generate(PROMPTS) for p in ("out", "theirs")]

    assert answers[0] == answers[1]
    assert answers[0] != Serving(tmp_path / "base", runner="auto").generate(PROMPTS)
    assert main(["lora", "merge", *(str(tmp_path / p) for p in ("adapter", "base", "out"))]) == 2


def test_an_adapter_of_another_model_is_refused(tmp_path, capsys):
    make(tmp_path / "one", LLAMA, target_modules=["q_proj"])
    make(tmp_path / "two", GPT2, target_modules=["c_attn"], fan_in_fan_out=True)
    wider = DENSE[LLAMA]()
    wider.hidden_size, wider.head_dim = 128, 32
    write(wider, 1, tmp_path / "wider")

    for base in ("two/base", "wider"):
        words = [str(tmp_path / p) for p in ("one/adapter", base)]
        assert main(["lora", "check", *words]) == 2
        assert "it was made for another model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"peft_type": "IA3"}, "peft_type IA3"),
        ({"bias": "all"}, "biases that were trained"),
        ({"r": 0}, "r must be 1 or more, not 0"),
        ({"r": "4"}, "no configuration of an adapter"),
        ({"use_dora": True}, "lacks model.layers.0.self_attn.q_proj.lora_magnitude_vector"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
    ],
)
def test_configurations_that_cannot_be_used(tmp_path, change, says):
    make(tmp_path, LLAMA, target_modules=["q_proj"])
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))

    with pytest.raises(ConfigError, match=says):
        read_adapter(tmp_path / "adapter")


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", None, "lacks"),
        (
            "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
            torch.full((4, 64), torch.nan),
            "not finite",
        ),
        (
            "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
            torch.zeros(3, 64),
            r"\[3, 64\] and \[64, 4\]",
        ),
        ("base_model.model.model.norm.weight", torch.ones(64), "is not understood"),
        ("base_model.model.x.lora_C.weight", torch.ones(64), "is not understood"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path, name, value, says):
    make(tmp_path, LLAMA, target_modules=["q_proj"])
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    tensors.pop(name, None)
    save_file(tensors if value is None else tensors | {name: value}, path)

    with pytest.raises(ConfigError, match=says):
        open_merged(tmp_path / "base", tmp_path / "adapter")


def test_a_pickle_is_no_adapter(tmp_path):
    make(tmp_path, LLAMA, target_modules=["q_proj"])
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    torch.save({}, tmp_path / "adapter" / "adapter_model.bin")
    file.unlink()

    with pytest.raises(ConfigError, match="pickles"):
        read_adapter(tmp_path / "adapter")

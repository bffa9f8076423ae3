"""Adapters that `peft` wrote are merged as `peft` merges them, and what does not fit is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from sylvan.cli.main import main
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.lora import read_adapter
from sylvan.runtime.models.lora_config import AdapterConfig
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
        ({"bias": "all"}, "trained biases"),
        ({"r": 0}, "r must be 1 or more, not 0"),
        ({"r": "4"}, "not an adapter configuration"),
        ({"use_dora": True}, "lacks model.layers.0.self_attn.q_proj.lora_magnitude_vector"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"alpha_pattern": {"(": 3}}, r"alpha_pattern '\(' is not a valid regular expression"),
        ({"alpha_pattern": {r"(a)\1": 3}}, "alpha_pattern .* back reference"),
        ({"alpha_pattern": {"a{2000}": 3}}, "alpha_pattern .* more than 1024 states"),
        ({"alpha_pattern": {f"[{n}]": n for n in range(65)}}, "65 entries; at most 4,096, 64 of"),
        ({"alpha_pattern": {str(n): n for n in range(4097)}}, "4,097 entries; at most 4,096"),
    ],
)
def test_configurations_that_cannot_be_used(tmp_path, change, says):
    make(tmp_path, LLAMA, target_modules=["q_proj"])
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))

    with pytest.raises(ConfigError, match=says):
        read_adapter(tmp_path / "adapter")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b'{"r": 4, "lora_alpha": NaN}', "malformed"),
        (b'{"r": 4, "lora_alpha": 1e999}', "out of range"),
        (b'{"r": 4, "lora_alpha": 8, "peft_type": "\xff"}', "utf-8"),
        (b'{"r": 4, "lora_alpha": 8, "x": ' + b"[" * 100_000, "recursion"),
        (b" " * (4 << 20) + b"{}", "at most 4,194,304 are read"),
    ],
)
def test_a_configuration_that_cannot_be_read(tmp_path, text, says):
    (tmp_path / "adapter_config.json").write_bytes(text)

    with pytest.raises(ConfigError, match=says):
        read_adapter(tmp_path)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "device", "directory", "larger than the system has"])
def test_nothing_but_files_of_a_bounded_size_are_read(tmp_path, name, kind):
    make(tmp_path, LLAMA, target_modules=["q_proj"])
    path = tmp_path / "adapter" / name
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "directory":
        path.mkdir()
    else:
        path.touch()
        os.truncate(path, 1 << 42)

    says = "at most" if kind.startswith("larger") else "not a regular file"
    with pytest.raises(ConfigError, match=says):
        read_adapter(path.parent, 1 << 20)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("q_proj", True),
        ("self_attn.q_proj", True),
        ("_proj", False),
        ("model.layers.0", False),
        (r"layers\.\d+\.self_attn\.(q|k)_proj", True),
        (r"^model\.layers\.[0-3]\..*", True),
        (r".*q_proj$", True),
        (r"layers\.[1-3]\..*", False),
        (r"(([a-z_.0-9]*)*)*X", False),
    ],
)
def test_alphas_of_modules_are_those_that_peft_finds(key, meant):
    """The last pattern would take `re` longer than there is time."""
    config = AdapterConfig(r=4, lora_alpha=8, alpha_pattern={key: 2})
    name = "model.layers.0.self_attn.q_proj"
    if "X" not in key:
        assert (peft.utils.other.get_pattern_key([key], name) == key) == meant

    assert config.scale(name, 4) == (0.5 if meant else 2)


def test_a_scale_that_is_no_float32(tmp_path):
    config = AdapterConfig(r=4, lora_alpha=1e300)

    with pytest.raises(ConfigError, match=r"lora_alpha 1e\+300 of 'q_proj'"):
        config.scale("q_proj", 4)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", None, "lacks"),
        *(
            (
                "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
                torch.zeros(4, 64, dtype=dtype),
                f"is of {dtype}; adapters have bfloat16, float16, float32, float64",
            )
            for dtype in (torch.int64, torch.bool, torch.float8_e4m3fn)
        ),
        (
            "model.layers.0.self_attn.q_proj.lora_A.weight",
            torch.zeros(4, 64),
            r"model.layers.0.self_attn.q_proj.lora_A twice",
        ),
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
        ("base_model.model.model.norm.weight", torch.ones(64), "is unknown"),
        ("base_model.model.x.lora_C.weight", torch.ones(64), "is unknown"),
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


def test_matrices_of_no_rank(tmp_path):
    make(tmp_path, LLAMA, target_modules=["q_proj"])
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file({n: t[:0] if "lora_A" in n else t[:, :0] for n, t in tensors.items()}, path)

    with pytest.raises(ConfigError, match=r"have no rank: \[0, 64\]"):
        read_adapter(path.parent)


def test_a_pickle_is_no_adapter(tmp_path):
    make(tmp_path, LLAMA, target_modules=["q_proj"])
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    torch.save({}, tmp_path / "adapter" / "adapter_model.bin")
    file.unlink()

    with pytest.raises(ConfigError, match="pickles"):
        read_adapter(tmp_path / "adapter")

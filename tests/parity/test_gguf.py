"""Models in GGUF files against transformers with the weights that the files hold (fp32)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from sylvan.config.checkpoint import model_dir, model_facts
from sylvan.runtime.models.files import open_weights
from tests.parity.checkpoints import LLAMA3_ROPE, SHAPE
from tests.parity.compare import compare
from tests.parity.serving import Serving

pytest.importorskip("gguf")

from tests.support import gguf_files

WIDE = SHAPE | {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
LOGPROBS = 5e-5
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**WIDE),
    "llama-tied": lambda: transformers.LlamaConfig(
        **WIDE | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}
    ),
    "qwen2": lambda: transformers.Qwen2Config(**WIDE | {"tie_word_embeddings": True}),
    "qwen3": lambda: transformers.Qwen3Config(**WIDE | {"head_dim": 32}),
}
KINDS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K"]


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def nothing(out) -> None:
    """No further metadata."""


def made(path: Path, name: str, kind: str, more=nothing, **changes):
    torch.manual_seed(3)
    config = CONFIGS[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("bias") or "norm" in parameter_name:
            parameter.data += torch.randn_like(parameter) * 0.1
    gguf_files.write_model(model.eval(), path, name.partition("-")[0], kind, more)
    return model


def test_weights_are_those_of_the_file(tmp_path):
    for kind in KINDS:
        model = made(tmp_path / f"{kind}.gguf", "llama", kind)
        weights = open_weights(model_dir(str(tmp_path / f"{kind}.gguf")))
        state = model.state_dict()

        assert set(weights.tensors) == set(state)
        assert all(torch.equal(weights.tensor(n).float(), state[n]) for n in state), kind


@pytest.mark.parametrize(
    ("name", "kind"),
    [("llama", "Q4_K"), ("llama-tied", "F32"), ("qwen2", "Q8_0"), ("qwen3", "Q4_0")],
)
def test_gguf_equals_transformers(tmp_path, name, kind):
    model = made(tmp_path / "m.gguf", name, kind)

    found = compare(_as_float32(model_dir(str(tmp_path / "m.gguf"))), model)

    assert found.logprob < LOGPROBS
    assert found.modes == ()


def _as_float32(folder: Path) -> Path:
    """The same with config.json asking for float32, as `--dtype float32` does."""
    config = (folder / "config.json").read_text()
    for name in ("bfloat16", "float16"):
        config = config.replace(f'"{name}"', '"float32"')
    (folder / "config.json").write_text(config)
    return folder


def test_llama3_frequencies_come_from_their_factors(tmp_path):
    rope = {"rope_parameters": LLAMA3_ROPE}
    config = transformers.LlamaConfig(**WIDE | rope)
    inv, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = LLAMA3_ROPE["rope_theta"] ** -(torch.arange(0, 64, 2) / 64)

    def factors(out) -> None:
        out.add_tensor("rope_freqs.weight", (plain / inv).numpy().astype(np.float32))

    model = made(tmp_path / "m.gguf", "llama", "F32", factors, **rope)

    found = compare(model_dir(str(tmp_path / "m.gguf")), model)
    # a quotient rounded to float32 turns the last positions by some 1e-5
    assert found.logprob < 4 * LOGPROBS
    assert found.modes == ()


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_scaled_positions_come_from_the_metadata(tmp_path, kind):
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    rope |= {"original_max_position_embeddings": 64} if kind == "yarn" else {}

    def scaling(out) -> None:
        out.add_rope_scaling_type(gguf_files.gguf.RopeScalingType(kind))
        out.add_rope_scaling_factor(4.0)
        if kind == "yarn":
            out.add_rope_scaling_orig_ctx_len(64)

    model = made(tmp_path / "m.gguf", "llama", "F32", scaling, rope_parameters=rope)

    found = compare(model_dir(str(tmp_path / "m.gguf")), model)
    assert found.logprob < LOGPROBS
    assert found.modes == ()


def test_a_q4_k_block_is_what_ggml_says(tmp_path):
    made(tmp_path / "m.gguf", "llama", "Q4_K")
    weights = open_weights(model_dir(str(tmp_path / "m.gguf")))
    raw = gguf_files.random_q4_k((256, 256))[0]
    d, dmin = raw[:4].view(np.float16).astype(np.float32)
    s, levels = raw[4:16].astype(int), raw[16:]

    expected = []
    for j in range(8):
        if j < 4:
            scale, least = s[j] & 63, s[j + 4] & 63
        else:
            scale = (s[j + 4] & 15) | ((s[j - 4] >> 6) << 4)
            least = (s[j + 4] >> 4) | ((s[j] >> 6) << 4)
        part = levels[j // 2 * 32 : j // 2 * 32 + 32]
        part = (part >> 4) if j % 2 else (part & 15)
        expected.append(d * scale * part - dmin * least)

    found = weights.tensor("model.layers.0.mlp.up_proj.weight")[0].numpy()
    assert np.allclose(found, np.concatenate(expected), atol=1e-6)


def test_dtype_and_sizes_are_known_before_loading(tmp_path):
    made(tmp_path / "a.gguf", "qwen2", "Q8_0")
    made(tmp_path / "b.gguf", "llama", "F16")
    eight, half = (model_facts(str(tmp_path / f"{name}.gguf")) for name in "ab")

    assert (eight.weights, eight.dtype, half.dtype) == ("gguf", "bfloat16", "float16")
    assert eight.num_params == sum(
        int(np.prod(t.shape)) for t in open_weights(model_dir(eight.name)).tensors.values()
    )


def test_gguf_is_quantised_while_loading(tmp_path):
    made(tmp_path / "m.gguf", "llama", "Q8_0")
    folder = model_dir(str(tmp_path / "m.gguf"))

    plain = Serving(folder, options={"dtype": "float32"})
    eight = Serving(folder, options={"dtype": "float32", "quantization": "w8a8"})

    assert eight.facts.weight_bytes < 0.6 * plain.facts.weight_bytes
    assert len(eight.generate([[4, 5, 6]], max_new_tokens=4)[0]) == 4

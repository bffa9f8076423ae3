from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sylvan.kernels import ops
from sylvan.kernels.matmul.weights import DeferredWeight
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.layers.build import Build
from sylvan.runtime.models.checkpoint import check_finite, defer_weights, load_weights
from sylvan.runtime.models.dummy import dummy_weights
from sylvan.runtime.models.registry import load_config, load_family
from sylvan.runtime.models.safetensors import Checkpoint

RAW = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}
LAYER = "model.layers.0."


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "model.embed_tokens.weight": (11, 8),
        "model.norm.weight": (8,),
        "lm_head.weight": (11, 8),
        LAYER + "input_layernorm.weight": (8,),
        LAYER + "post_attention_layernorm.weight": (8,),
        LAYER + "self_attn.q_proj.weight": (8, 8),
        LAYER + "self_attn.k_proj.weight": (4, 8),
        LAYER + "self_attn.v_proj.weight": (4, 8),
        LAYER + "self_attn.o_proj.weight": (8, 8),
        LAYER + "mlp.gate_proj.weight": (12, 8),
        LAYER + "mlp.up_proj.weight": (12, 8),
        LAYER + "mlp.down_proj.weight": (8, 12),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def model_in(path, dtype=torch.float32, **changes):
    (path / "config.json").write_text(json.dumps(RAW | changes))
    config = load_config(path)
    return load_family(config.architecture).model(config, Build(dtype=dtype, length=32))


def loaded(path, weights, **changes):
    save_file(weights, path / "model.safetensors")
    model = model_in(path, **changes)
    load_weights(model, path)
    return model


def test_fused_parameters_join_in_order(tmp_path):
    weights = tensors()

    model = loaded(tmp_path, weights)

    parts = [weights[f"{LAYER}self_attn.{x}_proj.weight"] for x in "qkv"]
    assert model.layers[0].self_attn.qkv_proj.weight.equal(torch.cat(parts))
    parts = [weights[f"{LAYER}mlp.{x}_proj.weight"] for x in ("gate", "up")]
    assert model.layers[0].mlp.gate_up_proj.weight.equal(torch.cat(parts))


def test_names_without_prefix_are_the_same_model(tmp_path):
    weights = {name.removeprefix("model."): t for name, t in tensors().items()}

    assert loaded(tmp_path, weights).norm.weight.equal(weights["norm.weight"])


def test_tied_head_is_the_embedding(tmp_path):
    weights = tensors()
    del weights["lm_head.weight"]

    model = loaded(tmp_path, weights, tie_word_embeddings=True)

    assert model.lm_head.weight is model.embed_tokens.weight


def test_stored_head_of_a_tied_model_is_ignored(tmp_path):
    weights = tensors()

    model = loaded(tmp_path, weights, tie_word_embeddings=True)

    assert model.lm_head.weight.equal(weights["model.embed_tokens.weight"])


def test_derived_buffers_are_ignored(tmp_path):
    weights = tensors() | {LAYER + "self_attn.rotary_emb.inv_freq": torch.ones(2)}

    loaded(tmp_path, weights)


def test_layers_that_draft_further_tokens_are_ignored(tmp_path):
    # mtp.* as Qwen3-Next has them; a layer behind the last one as DeepSeek V3 and GLM 4.5 do
    behind = LAYER.replace("layers.0.", "layers.1.")
    extra = {"mtp.fc.weight": torch.ones(2, 2), f"{behind}eh_proj.weight": torch.ones(2)}

    loaded(tmp_path, tensors() | extra, num_nextn_predict_layers=1)
    with pytest.raises(ConfigError, match="which this architecture does not use"):
        loaded(tmp_path, tensors() | extra)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("wanted", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes_are_converted(tmp_path, stored, wanted):
    weights = {name: t.to(stored) for name, t in tensors().items()}

    model = loaded(tmp_path, weights, dtype=wanted)

    assert model.norm.weight.equal(weights["model.norm.weight"].to(wanted))


def test_shards_and_progress(tmp_path):
    weights = tensors()
    names = sorted(weights)
    files = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, part in files.items():
        save_file({name: weights[name] for name in part}, tmp_path / file)
    places = {name: file for file, part in files.items() for name in part}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    model, seen = model_in(tmp_path), []

    load_weights(model, tmp_path, lambda done, total: seen.append((done, total)))

    total = sum(t.numel() * 4 for t in weights.values())
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)
    assert model.lm_head.weight.equal(weights["lm_head.weight"])
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"b\.safetensors.* is missing"):
        Checkpoint(tmp_path)


def change(weights, name, value):
    weights[LAYER + name] = value(weights[LAYER + name])


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            lambda w: w.pop(LAYER + "mlp.up_proj.weight"),
            "lacks the tensor 'model.layers.0.mlp.up_proj",
        ),
        (lambda w: w.update({"model.extra.weight": torch.ones(1)}), "has the tensor 'model.extra"),
        (
            lambda w: change(w, "self_attn.k_proj.weight", lambda t: t[:2].clone()),
            r"k_proj.weight' has shape \[2, 8\], but config.json implies \[4, 8\]",
        ),
        (
            lambda w: change(w, "mlp.down_proj.weight", lambda t: t.fill_(float("nan"))),
            "'model.layers.0.mlp.down_proj.weight' are not finite",
        ),
        (
            lambda w: change(w, "self_attn.k_proj.weight", lambda t: t.fill_(float("inf"))),
            "'model.layers.0.self_attn.k_proj.weight' are not finite",
        ),
        (
            lambda w: w["model.norm.weight"].fill_(float("inf")),
            "'model.norm.weight' are not finite",
        ),
        (
            lambda w: change(w, "self_attn.o_proj.weight", lambda t: t.to(torch.int8)),
            "stored as torch.int8",
        ),
    ],
)
def test_wrong_tensors_are_refused_by_name(tmp_path, spoil, words):
    weights = tensors()
    spoil(weights)

    with pytest.raises(ConfigError, match=words):
        loaded(tmp_path, weights)


def test_overflow_in_conversion_is_refused(tmp_path):
    weights = tensors()
    weights["model.norm.weight"][0] = 1e6

    with pytest.raises(ConfigError, match=r"not finite .* as torch.float16"):
        loaded(tmp_path, weights, dtype=torch.float16)


def test_truncated_file_names_the_first_lost_tensor(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file(tensors(), file)
    file.write_bytes(file.read_bytes()[:-100])

    with pytest.raises(ConfigError, match=r"is truncated: tensor '.*' ends at byte"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 64, b"\x02" + b"\0" * 7 + b"[]"])
def test_broken_files_are_refused(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)

    with pytest.raises(ConfigError, match="safetensors"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"dtype": "Q9", "shape": [1], "data_offsets": [0, 4]}, "cannot read the entry"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "contradicts its shape"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}, "impossible place"),
        ({"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}, "impossible place or shape"),
        ([], "cannot read the entry"),
    ],
)
def test_broken_entries_are_refused_by_name(tmp_path, entry, words):
    header = json.dumps({"w": entry}).encode()
    content = len(header).to_bytes(8, "little") + header + b"\0" * 8
    (tmp_path / "model.safetensors").write_bytes(content)

    with pytest.raises(ConfigError, match=words) as caught:
        Checkpoint(tmp_path)
    assert "'w'" in str(caught.value)


def test_index_may_not_leave_the_directory(tmp_path):
    places = {"w": "../secret.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))

    with pytest.raises(ConfigError, match="not a plain file name"):
        Checkpoint(tmp_path)


def test_directory_without_weights_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no"):
        Checkpoint(tmp_path)


def test_deferred_matrices_are_read_on_demand_and_tied_ones_once(tmp_path):
    weights = tensors()
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    model, seen = model_in(tmp_path, tie_word_embeddings=True), []

    defer_weights(model, tmp_path, lambda done, total: seen.append((done, total)))

    head = model.lm_head.weight
    assert isinstance(head, DeferredWeight)
    assert head is model.embed_tokens.weight
    assert model.norm.weight.equal(weights["model.norm.weight"])
    assert seen[-1][0] < seen[-1][1]
    x = torch.randn(3, 8)
    y = ops.linear(x, model.layers[0].self_attn.o_proj.weight)
    assert y.equal(x @ weights[LAYER + "self_attn.o_proj.weight"].T)


def test_dummy_weights_depend_on_seed_only(tmp_path):
    a, b, c = (model_in(tmp_path) for _ in range(3))

    dummy_weights(a, 1)
    dummy_weights(b, 1)
    dummy_weights(c, 2)

    assert a.lm_head.weight.equal(b.lm_head.weight)
    assert not a.lm_head.weight.equal(c.lm_head.weight)
    assert a.norm.weight.eq(1).all()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_tensors_asked_for_earlier_are_not_kept_resident(tmp_path):
    written = {f"t{i:02}": torch.full((256, 1024), float(i)) for i in range(32)}  # 1 MiB each
    save_file(written, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    first = checkpoint.tensor("t00")
    for name, tensor in written.items():
        assert torch.equal(checkpoint.tensor(name), tensor)
    assert resident_kib(tmp_path / "model.safetensors") < 12 * 1024
    assert torch.equal(first, written["t00"])  # who kept one still reads it


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_that_are_not_finite_are_refused_and_large_ones_are_not(dtype):
    largest = torch.full((64, 64), torch.finfo(dtype).max, dtype=dtype)
    assert not largest.sum().isfinite()
    check_finite("large", largest)
    check_finite("empty", torch.empty(0, dtype=dtype))
    for wrong in (torch.nan, torch.inf, -torch.inf):
        tensor = torch.ones(64, 64, dtype=dtype)
        tensor[3, 5] = wrong
        with pytest.raises(ConfigError, match="'w' are not finite"):
            check_finite("w", tensor)


def resident_kib(file: Path) -> int:
    """How much of a mapped file is in the memory of this process."""
    regions = Path("/proc/self/smaps").read_text().split(str(file))[1:]
    return sum(int(region.split("Rss:")[1].split()[0]) for region in regions)

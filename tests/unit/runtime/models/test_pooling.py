"""How sentence-transformers' module files are read."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.config import ModelConfig
from sylvan.runtime.models.pooling import PoolingOverride, read_pooling
from sylvan.runtime.models.rope import RopeParams

SIZE = 8


def config(**changes):
    sizes = {
        "vocab_size": 9,
        "hidden_size": SIZE,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 16,
    }
    known = {"architecture": "X", "rope": RopeParams(), "head": "none", "causal": False}
    return ModelConfig(**(sizes | known | changes))


def write(folder, *kinds, pooling=None):
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
    ]
    for i, kind in enumerate(kinds, 1):
        path = f"{i}_{kind}"
        modules.append(
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        )
        (folder / path).mkdir()
        if kind == "Pooling":
            (folder / path / "config.json").write_text(json.dumps(pooling))
    (folder / "modules.json").write_text(json.dumps(modules))


def read(folder, override=None, **changes):
    return read_pooling(folder, config(**changes), override or PoolingOverride())


@pytest.mark.parametrize(
    ("pooling", "modes"),
    [
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, ("mean",)),
        ({"pooling_mode_lasttoken": True, "include_prompt": True}, ("last",)),
        ({"pooling_mode_max_tokens": True, "pooling_mode_cls_token": True}, ("max", "cls")),
        ({"pooling_mode": "mean"}, ("mean",)),
        ({"pooling_mode": ["cls", "lasttoken"]}, ("cls", "last")),
    ],
)
def test_the_pooling_module_says_how(tmp_path, pooling, modes):
    write(tmp_path, "Pooling", pooling=pooling)

    found = read(tmp_path)

    assert found.modes == modes
    assert found.size == SIZE * len(modes)
    assert not found.normalize


def test_a_normalize_module_gives_unit_length(tmp_path):
    write(tmp_path, "Pooling", "Normalize", pooling={"pooling_mode": "cls"})

    assert read(tmp_path).normalize


def test_without_modules_the_custom_of_the_kind_holds(tmp_path):
    assert read(tmp_path).modes == ("cls",)
    assert read(tmp_path, causal=True).modes == ("last",)
    assert read(tmp_path).normalize


def test_the_operator_has_the_last_word(tmp_path):
    write(tmp_path, "Pooling", pooling={"pooling_mode": "cls"})

    found = read(tmp_path, PoolingOverride(mode="mean", normalize=True))

    assert (found.modes, found.normalize) == (("mean",), True)


def test_dense_layers_are_applied(tmp_path):
    write(tmp_path, "Pooling", "Dense", pooling={"pooling_mode": "mean"})
    weight, bias = torch.randn(3, SIZE), torch.randn(3)
    folder = tmp_path / "2_Dense"
    save_file({"linear.weight": weight, "linear.bias": bias}, folder / "model.safetensors")
    name = "torch.nn.modules.activation.Tanh"
    (folder / "config.json").write_text(json.dumps({"activation_function": name}))

    found = read(tmp_path)

    vector = torch.randn(SIZE)
    assert found.size == 3
    assert torch.allclose(found.transforms[0](vector), torch.tanh(weight @ vector + bias))


def test_dense_layers_of_another_size_are_refused(tmp_path):
    write(tmp_path, "Pooling", "Dense", pooling={"pooling_mode": "mean"})
    folder = tmp_path / "2_Dense"
    save_file({"linear.weight": torch.randn(3, 5)}, folder / "model.safetensors")
    name = "torch.nn.modules.linear.Identity"
    (folder / "config.json").write_text(json.dumps({"activation_function": name}))

    with pytest.raises(ConfigError, match="do not fit"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("kind", "pooling", "message"),
    [
        ("WordWeights", None, "'WordWeights', which is not supported"),
        ("Pooling", {}, "enables no pooling mode"),
        ("Pooling", {"pooling_mode": "median"}, "unknown pooling 'median'"),
    ],
)
def test_what_cannot_be_honoured_is_refused(tmp_path, kind, pooling, message):
    write(tmp_path, kind, pooling=pooling)

    with pytest.raises(ConfigError, match=message):
        read(tmp_path)


def test_folders_elsewhere_are_refused(tmp_path):
    entry = {"idx": 1, "path": "../other", "type": "sentence_transformers.models.Pooling"}
    (tmp_path / "modules.json").write_text(json.dumps([entry]))

    with pytest.raises(ConfigError, match="outside"):
        read(tmp_path)


def test_labels_are_pooled_by_the_kind_of_model(tmp_path):
    write(tmp_path, "Pooling", pooling={"pooling_mode": "mean"})

    assert read(tmp_path, num_labels=2).modes == ("cls",)
    assert read(tmp_path, num_labels=2, causal=True).modes == ("last",)
    assert read(tmp_path, num_labels=2, raw={"classifier_pooling": "mean"}).modes == ("mean",)

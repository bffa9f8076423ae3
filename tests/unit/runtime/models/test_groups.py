"""Which layers share pages, and what the configuration may assume of it before a model is read."""

from __future__ import annotations

import json

import msgspec
import pytest
import transformers

from sylvan.config.checkpoint import model_facts
from sylvan.runtime.models.groups import LayerGroup, kv_groups
from sylvan.runtime.models.registry import load_config
from tests.parity.checkpoints import SHAPE
from tests.parity.families import DENSE
from tests.support.random_model import write_random_model


def written(path, config, **changes):
    """A directory with a config.json of transformers and no weights."""
    raw = json.loads(config.to_json_string(use_diff=False)) | changes
    named = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    (path / "config.json").write_text(json.dumps(raw | {"architectures": [named.__name__]}))
    return path


@pytest.mark.parametrize(
    ("config", "expected"),
    {
        "gemma2": (
            transformers.Gemma2Config(**SHAPE | {"num_hidden_layers": 4}, sliding_window=12),
            (LayerGroup("full", (1, 3)), LayerGroup("window", (0, 2), 12)),
        ),
        "gemma3": (
            transformers.Gemma3TextConfig(**SHAPE | {"num_hidden_layers": 7}, sliding_window=12),
            (LayerGroup("full", (5,)), LayerGroup("window", (0, 1, 2, 3, 4, 6), 12)),
        ),
        "gpt-oss": (
            transformers.GptOssConfig(**SHAPE | {"num_hidden_layers": 4}, sliding_window=128),
            (LayerGroup("full", (1, 3)), LayerGroup("window", (0, 2), 128)),
        ),
        "mistral": (
            transformers.MistralConfig(**SHAPE, sliding_window=12),
            (LayerGroup("window", (0, 1, 2), 12),),
        ),
        "mistral without": (
            transformers.MistralConfig(**SHAPE, sliding_window=None),
            (LayerGroup("full", (0, 1, 2)),),
        ),
        "phi3": (
            transformers.Phi3Config(**SHAPE, sliding_window=20),
            (LayerGroup("window", (0, 1, 2), 20),),
        ),
        "llama": (transformers.LlamaConfig(**SHAPE), (LayerGroup("full", (0, 1, 2)),)),
    }.values(),
)
def test_layers_with_the_same_window_share_pages(tmp_path, config, expected):
    assert kv_groups(load_config(written(tmp_path, config))) == expected


def test_other_kinds_of_layers(tmp_path):
    config = load_config(write_random_model(tmp_path, context_len=64))
    layers = tuple(range(config.num_hidden_layers))

    assert kv_groups(config) == (LayerGroup("full", layers),)
    assert kv_groups(msgspec.structs.replace(config, causal=False)) == ()
    mixed = msgspec.structs.replace(
        config,
        num_hidden_layers=5,
        layer_windows=(8, None, None, 4, 8),
        attention_layers=(1, 3, 4),  # the others keep states
    )
    assert kv_groups(mixed) == (
        LayerGroup("full", (0,)),
        LayerGroup("window", (1,), 4),
        LayerGroup("window", (2,), 8),
    )
    assert kv_groups(msgspec.structs.replace(mixed, attention_layers=())) == ()


@pytest.mark.parametrize("name", sorted(DENSE))
def test_memory_is_planned_for_windows_that_there_are(tmp_path, name):
    """A full-attention layer mistaken for a window layer would lack memory."""
    config = DENSE[name]()
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        pytest.skip("its text is part of another model")
    path = written(tmp_path, config)
    found = load_config(path)

    planned = model_facts(str(path)).layer_windows

    every = found.attention_layers or range(found.num_hidden_layers)
    windows = tuple(found.layer_windows[layer] for layer in every)
    assert planned in ((), windows)
    if getattr(config, "layer_types", None) and any(windows):
        assert planned == windows

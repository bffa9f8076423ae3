"""Where compressed attention keeps what, from config.json alone."""

from __future__ import annotations

import json

import pytest

from sylvan.config.checkpoint import model_facts
from sylvan.config.compressed import HEAVY, SPARSE, compressed_layout
from sylvan.config.plan import GroupBytes, group_bytes
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.config import kv_bytes_per_token, state_bytes
from sylvan.runtime.models.groups import kv_groups
from sylvan.runtime.models.registry import choose_path
from tests.support.published_checkpoints import PUBLISHED

FLASH = PUBLISHED["deepseek-ai/DeepSeek-V4-Flash"].raw


def test_entries_of_the_published_model_take_a_sixth_of_its_keys():
    layout = compressed_layout(FLASH)

    sparse, heavy = layout.layers[2], layout.layers[3]
    assert sparse is not None
    assert heavy is not None
    assert (sparse.columns, heavy.columns) == (160, 32)  # of 640 in 4 tokens, of 512 in 16
    assert layout.kv_layers == 21 + 20 // 5
    assert layout.numbers == 43 * 512 + 25 * 160
    assert layout.block == 16
    assert layout.layers[0] is layout.layers[1] is None


def test_no_two_layers_share_a_column():
    layout = compressed_layout(FLASH)
    used = [
        (layer.kv_layer, column)
        for layer in layout.layers
        if layer
        for column in range(layer.column, layer.column + layer.columns)
    ]

    assert len(set(used)) == len(used)
    assert max(used) < (layout.kv_layers, 0)
    assert all(column < layout.columns for _, column in used)


def test_memory_is_planned_as_it_is_laid_out(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(FLASH))
    config = choose_path(FLASH).config

    facts = model_facts(str(tmp_path))

    entries, windows = kv_groups(config)
    assert (entries.window, len(entries.layers), entries.columns) == (None, 25, 160)
    assert (windows.window, windows.layers) == (128, tuple(range(43)))
    assert 2 * facts.kv_per_token == kv_bytes_per_token(config, "bfloat16")
    assert 4 * facts.state_numbers == state_bytes(config)
    planned = group_bytes(2 * facts.kv_per_token, facts.layer_windows, 2 * facts.kv_entries)
    assert planned == (GroupBytes(2 * 25 * 160), GroupBytes(2 * 43 * 512, 128))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"compress_ratios": [0, 4]}, "layer_types must name one of"),
        ({"compress_ratios": [0, 5] * 22}, "layer_types must name one of"),
        ({"head_dim": 511}, "must divide by 4"),
        ({"sliding_window": 0}, "sliding_window must be a positive integer"),
        ({"compress_rates": {SPARSE: 4, HEAVY: 0}}, "compress_rates of heavily_compressed"),
        ({"o_groups": 5}, "o_groups must divide 64 heads"),
        ({"index_topk": 0}, "index_topk must be a positive integer"),
        ({"scoring_func": "tanh"}, "unknown scoring_func 'tanh'"),
    ],
)
def test_impossible_sizes_are_named(change, reason):
    with pytest.raises(ConfigError, match=reason):
        choose_path(FLASH | change)

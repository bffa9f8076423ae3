"""How many pages each KV group of a model gets."""

from __future__ import annotations

import msgspec
import torch

from sylvan.runtime.executor.build import build_executor
from sylvan.runtime.executor.facts import KVGroupFacts
from sylvan.runtime.executor.options import LocalOptions
from sylvan.runtime.executor.pools import pages_shape, tensor_pool
from sylvan.runtime.layers.build import Build
from sylvan.runtime.models.registry import load_config
from sylvan.runtime.pool.mha import GroupShape, KVShape
from tests.support.random_model import write_random_model

SIZES = {"page_size": 16, "max_batch_tokens": 32, "max_running_reqs": 2}
SHAPE = KVShape(num_layers=4, num_kv_heads=2, head_dim=8, num_pages=1001, page_size=16)


def options(**changes) -> LocalOptions:
    return LocalOptions(**SIZES | {"num_pages": 1001} | changes)


def config_of(tmp_path, windows):
    config = load_config(write_random_model(tmp_path, context_len=64))
    return msgspec.structs.replace(config, num_hidden_layers=4, layer_windows=windows)


def test_one_page_table_means_one_group(tmp_path):
    config = config_of(tmp_path, (None, 64, 64, 64))

    assert pages_shape(config, SHAPE, options()) == SHAPE
    same = config_of(tmp_path, (64,) * 4)
    assert pages_shape(same, SHAPE, options(grouped=True)) == SHAPE


def test_layers_with_a_window_take_less_memory_for_as_many_tokens(tmp_path):
    config = config_of(tmp_path, (None, 64, None, 64))

    found = pages_shape(config, SHAPE, options(grouped=True))

    # two requests, each 4 pages of a window and 2 at its ends; two steps of 2 pages; a quarter; 1
    windowed = 2 * 6 + 2 * 2 + 250 + 1
    assert found.num_pages == 1001
    assert found.groups == (GroupShape((0, 2), 1001), GroupShape((1, 3), windowed))
    pool = tensor_pool(config, found, Build(dtype=torch.float32, length=64), torch.float32)
    assert [group.num_pages for group in pool.groups] == [1001, windowed]


def test_memory_that_was_measured_is_divided(tmp_path):
    config = config_of(tmp_path, (None, 64, 64, 64))

    found = pages_shape(config, SHAPE, options(grouped=True, fill=True))

    full, windowed = found.groups
    # one layer of all tokens, three of a quarter of them and a little, in as much memory
    assert full.num_pages + 3 * windowed.num_pages <= 4 * 1001
    assert 4 * 1000 // (1 + 3 / 4) * 0.97 < full.num_pages < 4 * 1000 // (1 + 3 / 4)
    assert found.num_pages == full.num_pages
    limited = pages_shape(config, SHAPE, options(grouped=True, fill=True, most_pages=1201))
    assert limited.num_pages == 1201
    tiny = pages_shape(config, small(2), options(grouped=True, fill=True))
    assert all(group.num_pages >= 2 for group in tiny.groups)


def small(count: int) -> KVShape:
    return KVShape(num_layers=4, num_kv_heads=2, head_dim=8, num_pages=count, page_size=16)


def test_an_executor_tells_of_its_groups(tmp_path):
    path = write_random_model(tmp_path, context_len=64)

    executor, facts = build_executor(path, LocalOptions(**SIZES, num_pages=9))
    executor.close()

    assert facts.kv_groups == (KVGroupFacts(kind="full", num_pages=9),)

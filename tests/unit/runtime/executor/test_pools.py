"""How many pages each KV group of a model gets."""

from __future__ import annotations

import msgspec
import torch

from sylvan.runtime.cache.groups import KVGroup
from sylvan.runtime.executor.build import build_executor
from sylvan.runtime.executor.options import LocalOptions
from sylvan.runtime.executor.pools import cache_groups, pages_shape, tensor_pool
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


def test_layers_that_need_the_same_tokens_share_all_pages(tmp_path):
    same = config_of(tmp_path, (64,) * 4)
    assert pages_shape(same, SHAPE, options()) == SHAPE


def test_layers_with_a_window_take_less_memory_for_as_many_tokens(tmp_path):
    config = config_of(tmp_path, (None, 64, None, 64))

    found = pages_shape(config, SHAPE, options())

    # two requests, each 4 pages of a window and 2 at its ends; two steps of 2 pages; a quarter; 1
    windowed = 2 * 6 + 2 * 2 + 250 + 1
    assert found.num_pages == 1001
    assert found.groups == (GroupShape((0, 2), 1001), GroupShape((1, 3), windowed))
    pool = tensor_pool(config, found, Build(dtype=torch.float32, length=64), torch.float32)
    assert [group.num_pages for group in pool.groups] == [1001, windowed]


def test_memory_that_was_measured_is_divided(tmp_path):
    config = config_of(tmp_path, (None, 64, 64, 64))

    found = pages_shape(config, SHAPE, options(fill=True))

    full, windowed = found.groups
    # one layer of all tokens, three of a quarter of them and a little, in as much memory
    assert full.num_pages + 3 * windowed.num_pages <= 4 * 1001
    assert 4 * 1000 // (1 + 3 / 4) * 0.97 < full.num_pages < 4 * 1000 // (1 + 3 / 4)
    assert found.num_pages == full.num_pages
    limited = pages_shape(config, SHAPE, options(fill=True, max_pages=1201))
    assert limited.num_pages == 1201
    tiny = pages_shape(config, small(2), options(fill=True))
    assert all(group.num_pages >= 2 for group in tiny.groups)


def small(count: int) -> KVShape:
    return KVShape(num_layers=4, num_kv_heads=2, head_dim=8, num_pages=count, page_size=16)


def test_an_executor_tells_of_its_groups(tmp_path):
    path = write_random_model(tmp_path, context_len=64)

    executor, facts = build_executor(path, LocalOptions(**SIZES, num_pages=9))
    executor.close()

    full = KVGroup(name="full", kind="full", num_pages=9, page_size=16)
    assert executor.caps.kv_groups == (full,)
    assert facts.kv_bytes >= 9 * 16 * facts.kv_bytes_per_token


def test_groups_of_a_model_in_the_order_of_its_page_tables(tmp_path):
    config = config_of(tmp_path, (64, None, 32, 64))
    shape = pages_shape(config, SHAPE, options())

    found = cache_groups(config, shape, num_states=5)

    kinds = [(group.name, group.kind, group.window) for group in found]
    windows = [("window-32", "window", 32), ("window-64", "window", 64)]
    assert kinds == [("full", "full", 0), *windows, ("state", "state", 0)]
    assert [g.num_pages for g in found] == [*(g.num_pages for g in shape.groups), 5]
    blind = msgspec.structs.replace(config, causal=False)
    assert [g.kind for g in cache_groups(blind, SHAPE)] == ["full"]

"""KV groups in the memory plan: what windows need, and what then fits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sylvan.config.fields import replaced
from sylvan.config.plan import (
    GroupBytes,
    PlannedLoad,
    fitting_tokens,
    group_bytes,
    group_tokens,
    kv_bytes,
)
from sylvan.config.resolve import resolve
from sylvan.config.tree import Config
from tests.support.config_facts import GIB, make_facts, make_model

LOAD = PlannedLoad(running_reqs=4, step_tokens=100, page_size=16)
GEMMA = (None, 64, 64, 64)


def test_layers_of_a_window_are_a_group_and_full_attention_is_the_first():
    assert group_bytes(4000, (512, None, 128, 512)) == (
        GroupBytes(1000),
        GroupBytes(1000, 128),
        GroupBytes(2000, 512),
    )
    assert group_bytes(4000) == (GroupBytes(4000),)
    assert group_bytes(4000, (64, 64)) == (GroupBytes(4000, 64),)


def test_a_window_needs_itself_for_each_request_and_what_steps_add():
    # of each request 512 / 16 pages, one more where it begins inside one, one that is being filled;
    # two steps of 7 pages; a quarter of the cache for prefixes
    assert group_tokens(512, 40_000, LOAD) == 4 * 34 * 16 + 2 * 112 + 10_000
    assert group_tokens(500, 40_000, LOAD) == group_tokens(512, 40_000, LOAD)
    assert group_tokens(512, 1000, LOAD) == 1000, "no more than full attention has"
    assert group_tokens(None, 40_000, LOAD) == 40_000


@given(
    st.lists(st.none() | st.integers(1, 5000), min_size=1, max_size=6),
    st.integers(0, 1 << 32),
    st.integers(1, 64),
    st.integers(1, 4096),
    st.sampled_from([1, 16, 48, 64]),
)
def test_as_many_tokens_fit_as_can(windows, budget, running, step, page):
    load = PlannedLoad(running_reqs=running, step_tokens=step, page_size=page)
    groups = group_bytes(1536 * len(windows), windows)

    found = fitting_tokens(groups, budget, load)

    assert found % page == 0
    assert kv_bytes(groups, found, load) <= budget
    if None in windows:
        assert kv_bytes(groups, found + page, load) > budget
    whole = fitting_tokens(group_bytes(1536 * len(windows)), budget, load)
    assert found >= whole == budget // (1536 * len(windows) * page) * page


def test_layers_with_windows_need_less_memory():
    model = make_model(kv_per_token=1536 * 64, layer_windows=GEMMA)
    config = replaced(Config(), {"scheduler.max_running_reqs": 8, "scheduler.max_batch_tokens": 64})
    found = resolve(config, make_facts(model=model)).plan
    whole = resolve(config, make_facts(model=make_model(kv_per_token=1536 * 64))).plan

    assert found.kv_bytes_per_token == whole.kv_bytes_per_token == 1536 * 64 * 2
    assert found.total_bytes <= 2 * GIB
    assert [group.window for group in found.groups] == [None, 64]
    assert found.num_tokens == 8 * 2048 > whole.num_tokens  # all that requests can have

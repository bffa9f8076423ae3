"""One cache for each group of ranks, seen as one."""

from __future__ import annotations

import numpy as np
import pytest

from sylvan.runtime.cache.build import caches_by_rank
from sylvan.runtime.cache.by_rank import CachesByRank, capacity_tokens
from sylvan.runtime.cache.types import CacheKey
from tests.support.cache_checks import check_cache
from tests.support.kv import kv_groups

SIZE = 4


def made(pages: int = 8, windows=(), count: int = 2) -> CachesByRank:
    return caches_by_rank(kv_groups(pages + 1, SIZE, windows), count, "radix", "lru")


def key(*tokens: int) -> CacheKey:
    found = CacheKey(np.array(tokens, np.int32))
    found.first = made().tree.first_page(found)
    return found


def held(cache: CachesByRank, tokens: list[int]):
    kv = cache.acquire(key(*tokens), len(tokens) - 1)
    assert cache.extend(kv, len(tokens), computed=kv.cached)
    return kv


def done(cache: CachesByRank, kv, tokens: list[int]) -> None:
    cache.release(kv, len(tokens), np.array(tokens, np.int32), step=1)


def test_requests_are_spread_and_their_pages_do_not_overlap():
    cache = made(windows=((6, 9),))
    handles = [held(cache, [100 * n + i for i in range(9)]) for n in range(4)]
    assert sorted(kv.rank for kv in handles) == [0, 0, 1, 1]
    for group in range(2):
        pages = [kv.tables[group].pages[: kv.num_pages] for kv in handles]
        used = np.concatenate([p[p > 0] for p in pages])
        assert len(used) == len(set(used.tolist()))
        for kv, own in zip(handles, pages, strict=True):
            assert {(page - 1) // 8 for page in own.tolist() if page} == {kv.rank}
    check_cache(cache, handles)
    for n, kv in enumerate(handles):
        done(cache, kv, [100 * n + i for i in range(9)])
    check_cache(cache, [])
    assert cache.used_tokens == 0
    assert capacity_tokens(cache) == 2 * cache.total_tokens == 2 * 8 * SIZE


def test_a_request_goes_where_its_prefix_is_until_the_others_have_less_to_do():
    cache, prompt = made(pages=64), list(range(16))
    first = held(cache, prompt)
    done(cache, first, prompt)
    assert cache.tree.peek(key(*prompt), 15) == 15
    assert [*cache.tree.roots()] == [""]

    handles = [held(cache, [*prompt, 50 + n]) for n in range(5)]

    ranks = [kv.rank for kv in handles]
    assert ranks[:3] == [first.rank] * 3  # two more than the other group
    assert ranks[3] != first.rank
    assert [kv.cached for kv in handles[:3]] == [16] * 3
    assert handles[3].cached == 0


def test_a_group_without_room_is_left_out():
    cache = made()
    long = held(cache, list(range(31)))
    other = held(cache, list(range(40, 60)))
    assert other.rank != long.rank
    assert held(cache, list(range(70, 78))).rank == other.rank
    assert not cache.extend(long, 33, computed=31)
    assert cache.grow([other]) is None


def test_an_audit_repairs_the_part_that_lost_a_page():
    cache = made()
    kv = held(cache, list(range(9)))
    part = cache.parts[kv.rank]
    part._allocator.alloc(2)
    assert cache.audit([kv]).pages == 2
    check_cache(cache, [kv])


def test_groups_keep_no_states():
    with pytest.raises(ValueError, match="keep no recurrent states"):
        caches_by_rank(kv_groups(9, SIZE, states=3), 2, "radix", "lru")

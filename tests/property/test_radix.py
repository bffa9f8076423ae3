"""The radix tree against a dictionary of prefixes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sylvan.runtime.cache.eviction import eviction_policy
from sylvan.runtime.cache.radix import RadixCache
from sylvan.runtime.cache.types import CacheKey, MediaSpan, Node, tenant_span
from tests.support.kv import check_tree

sequences = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=25)


def key(tokens, namespace="", media=()):
    return CacheKey(np.array(tokens, np.int32), namespace, media)


@settings(max_examples=200, deadline=None)
@given(sequences, st.sampled_from([1, 2, 4]), st.booleans())
def test_match_finds_the_longest_cached_prefix(seqs, page, with_tail):
    tree, fresh = RadixCache(page, eviction_policy("lru")), itertools.count(1)
    known: set[tuple[int, ...]] = set()
    for step, seq in enumerate(seqs, 1):
        best = max(n for n in range(len(seq) + 1) if tuple(seq[:n]) in known or n == 0)

        found = tree.match(key(seq), len(seq), step=step)
        assert tree.peek(key(seq), len(seq)) == best
        assert found.length + found.tail_tokens == best
        assert found.length == best // page * page
        assert len(tree.pages(found.node)) == found.length // page

        pages = np.array([next(fresh) for _ in range(-(-len(seq) // page))], np.int32)
        done = tree.insert(key(seq), pages, with_tail=with_tail, step=step - 1)
        assert done.cached == found.length
        end = len(seq) if with_tail else len(seq) // page * page
        known |= {tuple(seq[:n]) for n in range(end + 1)}
        check_tree(tree)
    total = tree.total_pages
    assert len(tree.evict(10**6)) == total
    assert tree.total_pages == tree.evictable_pages == tree.num_nodes == 0
    assert not tree.roots()


@settings(max_examples=100, deadline=None)
@given(
    sequences,
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["lru", "lfu", "fifo", "mru", "filo", "slru", "priority"]),
    st.lists(st.integers(0, 6), min_size=25, max_size=25),
)
def test_eviction_returns_each_page_once_and_spares_the_locked(seqs, page, policy, needs):
    tree, fresh = RadixCache(page, eviction_policy(policy)), itertools.count(1)
    owned, locked = set(), []
    for step, (seq, need) in enumerate(zip(seqs, needs, strict=False), 1):
        pages = np.array([next(fresh) for _ in range(-(-len(seq) // page))], np.int32)
        done = tree.insert(key(seq), pages, with_tail=True, step=step)
        owned |= set(pages[done.cached // page : -(-done.length // page)].tolist())
        owned -= set(done.freed.tolist())
        if need % 3 == 0:
            tree.lock(done.node)
            locked.append((done.node, seq[: done.length]))
        before = tree.evictable_pages
        gone = tree.evict(need).tolist()
        assert len(gone) == min(need, before)
        assert len(set(gone)) == len(gone)
        assert set(gone) <= owned
        owned -= set(gone)
        for _, prefix in locked:
            assert tree.peek(key(prefix), len(prefix)) == len(prefix)
        check_tree(tree)
    for node, _ in locked:
        tree.unlock(node)
    assert set(tree.evict(10**6).tolist()) == owned


@settings(max_examples=100, deadline=None)
@given(
    sequences,
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["lru", "lfu", "fifo", "mru", "filo", "slru", "priority"]),
    st.lists(st.integers(0, 24), max_size=30),
)
def test_the_leaf_of_the_lowest_rank_goes_first(seqs, page, policy, uses):
    rank = eviction_policy(policy)
    tree, fresh = RadixCache(page, rank), itertools.count(1)
    for number in [*range(len(seqs)), *(use % len(seqs) for use in uses)]:
        seq = seqs[number]
        held = tree.match(key(seq), len(seq)).node
        tree.lock(held)
        pages = np.array([next(fresh) for _ in range(-(-len(seq) // page))], np.int32)
        done = tree.insert(
            key(seq), pages, with_tail=True, priority=number % 3, held=held, step=number
        )
        check_tree(tree)
        tree.unlock(done.node)
    check_tree(tree)
    while tree.evictable_pages:
        leaves = [node for node in nodes(tree) if not node.children]
        lowest = min(rank(node) for node in leaves)
        first = {int(node.pages[-1]) for node in leaves if rank(node) == lowest}
        assert tree.evict(1)[0] in first


@settings(max_examples=100, deadline=None)
@given(sequences, st.sampled_from([1, 2, 4]), st.lists(st.integers(0, 6), min_size=25, max_size=25))
def test_a_key_asked_about_again_finds_what_a_new_one_would(seqs, page, needs):
    tree, fresh = RadixCache(page, eviction_policy("lru")), itertools.count(1)
    waiting = [key(seq) for seq in seqs]
    for step, (seq, need) in enumerate(zip(seqs, needs, strict=False), 1):
        pages = np.array([next(fresh) for _ in range(-(-len(seq) // page))], np.int32)
        tree.insert(key(seq), pages, with_tail=need % 2 == 0, step=step)
        tree.evict(need // 2)
        for one in waiting:
            for limit in (len(one.tokens), len(one.tokens) - 1):
                assert tree.peek(one, limit) == tree.peek(CacheKey(one.tokens), limit)


def nodes(tree: RadixCache) -> Iterator[Node]:
    stack = [child for root in tree.roots().values() for child in root.children.values()]
    while stack:
        node = stack.pop()
        stack.extend(node.children.values())
        yield node


def test_namespaces_never_share():
    tree = RadixCache(2, eviction_policy("lru"))
    tree.insert(key([1, 2, 3, 4], "a"), np.array([1, 2], np.int32), with_tail=False)

    assert tree.peek(key([1, 2, 3, 4], "a"), 4) == 4
    assert tree.peek(key([1, 2, 3, 4], "b"), 4) == 0
    assert tree.peek(key([1, 2, 3, 4]), 4) == 0


def test_media_of_another_digest_never_match():
    tree = RadixCache(2, eviction_policy("lru"))
    one, other = (MediaSpan(2, 5, b"1" * 32),), (MediaSpan(2, 5, b"2" * 32),)
    tokens = [1, 2, 9, 9, 9, 3, 4, 5]
    tree.insert(key(tokens, media=one), np.array([1, 2, 3, 4], np.int32), with_tail=False)

    assert tree.peek(key(tokens, media=one), 8) == 8
    assert tree.peek(key(tokens, media=other), 8) == 2
    assert tree.peek(key(tokens), 8) == 2

    tree.insert(key(tokens, media=other), np.array([5, 6, 7, 8], np.int32), with_tail=False)
    assert tree.pages(tree.match(key(tokens, media=other), 8).node).tolist() == [1, 6, 7, 8]
    assert tree.pages(tree.match(key(tokens, media=one), 8).node).tolist() == [1, 2, 3, 4]
    check_tree(tree)


def test_tail_of_the_same_step_is_not_offered():
    tree = RadixCache(4, eviction_policy("lru"))
    tree.insert(key([1, 2, 3, 4, 5]), np.array([1, 2], np.int32), with_tail=True, step=7)

    assert tree.match(key([1, 2, 3, 9]), 4, step=7).tail is None
    found = tree.match(key([1, 2, 3, 9]), 4, step=8)
    assert found.tail.pages.tolist() == [1, 2]
    assert found.tail_tokens == 3


def test_longer_entry_replaces_the_tail_it_contains():
    tree = RadixCache(4, eviction_policy("lru"))
    tree.insert(key([1, 2]), np.array([1], np.int32), with_tail=True)

    done = tree.insert(key([1, 2, 3, 4, 5]), np.array([2, 3], np.int32), with_tail=True)

    assert done.freed.tolist() == [1]
    assert tree.num_nodes == 1
    check_tree(tree)


def test_events_tell_what_is_cached():
    tree = RadixCache(2, eviction_policy("lru"))
    tree.record_events()
    tree.insert(key([1, 2, 3, 4, 5, 6], "n"), np.array([1, 2, 3], np.int32), with_tail=False)
    tree.evict(1)

    events = [(e.kind, e.key.namespace, e.start, e.tokens.tolist()) for e in tree.take_events()]
    assert events == [("insert", "n", 0, [1, 2, 3, 4, 5, 6]), ("evict", "n", 4, [5, 6])]
    assert tree.take_events() == []


@pytest.mark.parametrize(
    ("policy", "victim"),
    [("lru", 2), ("mru", 1), ("fifo", 1), ("filo", 3), ("lfu", 2), ("slru", 2), ("priority", 3)],
)
def test_policy_chooses_the_victim(policy, victim):
    tree = RadixCache(1, eviction_policy(policy))
    for number, priority in ((1, 5), (2, 5), (3, 1)):
        tree.insert(key([number]), np.array([number], np.int32), with_tail=False, priority=priority)
    for number in (1, 3, 1, 3, 1):  # 2 is never used again; 1 is newest and used most
        node = tree.match(key([number]), 1).node
        tree.lock(node)
        tree.unlock(node)

    assert tree.evict(1).tolist() == [victim]


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize(("one", "other"), [(1, 3), (3, 1), (0, 2), (2, 5), (4, 4)])
def test_the_same_tokens_may_be_set_apart_from_different_positions(page, one, other):
    tree, tokens = RadixCache(page, eviction_policy("lru")), list(range(8))
    first, second = (key(tokens, ":", (tenant_span(start, "x"),)) for start in (one, other))
    count = 8 // page
    tree.insert(first, np.arange(1, 1 + count), with_tail=True)
    common = 8 if one == other else min(one, other)

    assert tree.peek(second, 8) == common
    assert tree.match(second, 8, step=1).length == common // page * page
    tree.insert(second, np.arange(20, 20 + count), with_tail=True)
    check_tree(tree)
    assert tree.peek(first, 8) == tree.peek(second, 8) == 8

"""Why a request hit or missed the cache."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sylvan.protocol.names import internal_name
from sylvan.protocol.requests import EmbedRequest
from sylvan.runtime.cache import view
from sylvan.runtime.cache.curve import BLOCK_TOKENS, block_hashes, hit_curve
from sylvan.runtime.cache.types import CacheKey, MediaSpan, tenant_span
from sylvan.runtime.features.explain.control import CacheExplain
from sylvan.runtime.sched.scheduler import Scheduler
from tests.support.kv import World, request


def start(pages: int = 12) -> tuple[World, CacheExplain]:
    plain = World(pages=pages, page_size=4)
    explain = CacheExplain(plain.tree)
    parts = plain.scheduler._deps
    plain.scheduler = Scheduler(replace(parts, capabilities=(explain,)), plain.scheduler._limits)
    return plain, explain


def run(world: World, rid: str, ids, new: int = 1, **fields) -> None:
    world.scheduler.add(request(rid, ids, new=new, **fields))
    world.run()


def test_first_prompt_was_never_seen():
    world, explain = start()
    run(world, "a", range(10))
    told = explain.explain("a")
    assert told["reason"] == "never_seen"
    assert (told["prompt_tokens"], told["cached_tokens"]) == (10, 0)


def test_repeated_prompt_is_all_cached():
    world, explain = start()
    run(world, "a", range(10))
    run(world, "b", range(10))
    assert explain.explain("b")["reason"] == "all_cached"
    assert explain.explain("b")["cached_tokens"] == 9


def test_divergence_shows_both_branches():
    world, explain = start(pages=40)
    run(world, "a", range(20))
    run(world, "b", [*range(9), 40, 41, 42])
    told = explain.explain("b")
    assert told["reason"] == "never_seen"
    assert told["divergence"]["position"] == 9
    assert told["divergence"]["ours"] == (40, 41, 42)
    assert told["divergence"]["theirs"][:2] == (9, 10)

    run(world, "c", [*range(14), 40, 41, 42])
    told = explain.explain("c")["divergence"]
    assert told["position"] == 14


def test_inside_a_page_the_branches_differ_at_the_very_token():
    world, explain = start(pages=40)
    run(world, "a", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    world.scheduler.step()
    assert world.tree.page_size == 4
    run(world, "b", [1, 2, 3, 4, 5, 6, 7, 8, 30, 31])
    told = explain.explain("b")["divergence"]
    assert told == {"position": 8, "ours": (30, 31), "theirs": (9, 10, 11, 12)}


def test_evicted_prompt_differs_from_one_never_seen():
    world, explain = start(pages=8)
    run(world, "a", [1] * 16)
    run(world, "x", [2] * 24, new=4)
    run(world, "y", [3] * 24, new=4)
    run(world, "b", [1] * 16)
    assert explain.explain("b")["reason"] == "evicted"


def test_other_namespace_is_named_to_the_operator_and_hidden_from_tenants():
    world, explain = start(pages=40)
    run(world, "a", range(16), cache_salt="one")
    run(world, "b", range(16), cache_salt="two")

    assert explain.explain("b")["reason"] == "other_namespace"
    assert explain.explain("b", owner="two")["reason"] == "never_seen"
    assert explain.explain("b", owner="one") is None
    assert explain.explain("unknown") is None


def test_tree_view_is_bounded_and_keeps_namespaces_apart():
    world, explain = start(pages=400)
    for number in range(30):
        run(world, str(number), [number] * 8, cache_salt="ab"[number % 2])

    whole = explain.tree(1000)
    assert whole["num_nodes"] == whole["shown_nodes"] == len(whole["nodes"]) == 30
    assert whole["namespaces"] == 2
    assert len(explain.tree(7)["nodes"]) == 7
    mine = explain.tree(1000, owner="a")["nodes"]
    assert len(mine) == 15
    assert {n["namespace"] for n in mine} == {":a"}


def test_a_declared_start_is_shared_by_tenants_and_nothing_else_is():
    world, explain = start(pages=60)
    public, own = list(range(100, 118)), list(range(12))
    run(world, "a", public + own, cache_salt="one", shared_tokens=18)
    run(world, "b", public + own, cache_salt="two", shared_tokens=18)
    run(world, "c", public + own, cache_salt="two", shared_tokens=18)
    run(world, "d", public + own, cache_salt="one")  # asked for nothing to be shared

    cached = {rid: explain.explain(rid)["cached_tokens"] for rid in "abcd"}
    assert cached == {"a": 0, "b": 18, "c": 29, "d": 0}  # 18 ends inside a page
    assert explain.explain("b", owner="two")["reason"] == "never_seen"
    assert explain.explain("b", owner="two")["divergence"]["theirs"] == ()
    assert explain.explain("b", owner="one") is None


def test_a_tenant_does_not_see_what_others_added_to_a_shared_start():
    world, explain = start(pages=60)
    public = list(range(100, 116))
    run(world, "a", [*public, *range(8)], cache_salt="one", shared_tokens=16)
    run(world, "b", [*public, *range(20, 28)], cache_salt="two", shared_tokens=16)

    heads = {tuple(n["head"][:1]) for n in explain.tree(100, owner="two")["nodes"]}
    assert heads == {(20,)}
    assert len(explain.tree(100)["nodes"]) == 3  # the shared start, and one end each


def test_what_another_lost_below_a_shared_start_reads_as_never_seen():
    world, explain = start(pages=9)
    public = list(range(100, 108))
    run(world, "a", [*public, *range(16)], cache_salt="one", shared_tokens=8)
    run(world, "x", [2] * 24, new=4)
    run(world, "b", [*public, *range(16)], cache_salt="two", shared_tokens=8)

    assert explain.explain("b", owner="two")["reason"] == "never_seen"


def test_a_tenant_does_not_see_what_calls_without_one_cached():
    world, explain = start(pages=60)
    run(world, "a", [*range(100, 112), *range(8)])
    run(world, "b", [*range(100, 132)], cache_salt="two", shared_tokens=24)

    assert explain.explain("b")["divergence"]["theirs"] == (0, 1, 2, 3)
    assert explain.explain("b", owner="two")["divergence"]["theirs"] == ()
    assert explain.explain("a", owner="two") is None
    heads = [n["head"][0] for n in explain.tree(100, owner="two")["nodes"]]
    assert heads == [112, 128]  # what it added, in the two steps that computed it


def test_the_tree_of_a_tenant_looks_at_few_nodes_of_others(monkeypatch):
    world, explain = start(pages=400)
    for number in range(30):
        run(world, f"a{number}", [number] * 8, cache_salt="one")
        below = [*range(100, 108), *[number] * 8]
        run(world, f"b{number}", below, cache_salt="one", shared_tokens=8)
    run(world, "c", [*range(100, 108), 7, 7, 7, 7], cache_salt="two", shared_tokens=8)
    looked = []
    kept = view.owned
    monkeypatch.setattr(view, "owned", lambda *args: looked.append(args) or kept(*args))

    assert len(explain.tree(100, owner="two")["nodes"]) == 1
    assert not any(namespace == ":one" for namespace, _, _ in looked)
    assert len(looked) < 40  # the shared start, and once each way from it


def test_embeddings_of_a_tenant_are_its_own():
    world, explain = start(pages=40)
    world.scheduler.add(
        EmbedRequest(rid="e", input_ids=np.arange(8, dtype=np.int32), cache_salt="one/")
    )
    world.run()

    assert explain.explain("e", owner="one/")["prompt_tokens"] == 8
    assert explain.explain("e", owner="two/") is None


def test_requests_of_one_rid_are_distinguished_by_their_tenants():
    world, explain = start(pages=40)
    run(world, internal_name("job", 0, 1, 1), range(8), cache_salt="one/")
    run(world, internal_name("job", 0, 2, 1), range(12), cache_salt="two/")
    run(world, internal_name("job.0", 0, 3, 1), range(16), cache_salt="one/")

    assert explain.explain("job", owner="one/")["prompt_tokens"] == 8
    assert explain.explain("job", owner="two/")["prompt_tokens"] == 12
    assert explain.explain("job", owner="three/") is None
    assert explain.explain("job")["prompt_tokens"] == 12  # the newest
    assert explain.explain("job.0")["prompt_tokens"] == 16


def test_curve_equals_a_simulated_lru_cache():
    rng = np.random.default_rng(0)
    shared = [rng.integers(0, 99, 4 * BLOCK_TOKENS, np.int32) for _ in range(6)]
    prompts = []
    for _ in range(60):
        own = rng.integers(0, 99, BLOCK_TOKENS, np.int32)
        prompts.append(block_hashes(CacheKey(np.concatenate([shared[rng.integers(6)], own]))))

    sizes = [n * BLOCK_TOKENS for n in (1, 5, 10, 20, 30, 100)]
    for size, rate in hit_curve(prompts, sizes):
        assert rate == pytest.approx(_lru(prompts, size // BLOCK_TOKENS))
    assert hit_curve([], sizes)[0] == (BLOCK_TOKENS, 0.0)


def _lru(prompts, room: int) -> float:
    held, hits, total = [], 0, 0
    for name in (n for p in prompts for n in p.tolist()):
        total += 1
        hits += name in held
        held = [n for n in held if n != name] + [name]
        held = held[-room:]
    return hits / total


def test_block_hash_stands_for_the_whole_prefix():
    a = np.arange(3 * BLOCK_TOKENS, dtype=np.int32)
    b = a.copy()
    b[0] = 7
    one, other = block_hashes(CacheKey(a)), block_hashes(CacheKey(b))
    assert len(one) == 3
    assert not set(one.tolist()) & set(other.tolist())
    assert block_hashes(CacheKey(a[: 2 * BLOCK_TOKENS + 5])).tolist() == one[:2].tolist()


LONG = np.arange(4 * BLOCK_TOKENS, dtype=np.int32) % 50


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [
        (CacheKey(LONG, ":a"), CacheKey(LONG, ":a"), 4),
        (CacheKey(LONG, ":a"), CacheKey(LONG, ":b"), 0),
        (CacheKey(LONG, "adapter:"), CacheKey(LONG, ":"), 0),
        (CacheKey(LONG, ":", (MediaSpan(70, 80, b"cat"),)), CacheKey(LONG, ":"), 1),
        (
            CacheKey(LONG, ":", (MediaSpan(130, 140, b"cat"),)),
            CacheKey(LONG, ":", (MediaSpan(130, 140, b"dog"),)),
            2,
        ),
        (
            CacheKey(LONG, ":", (MediaSpan(0, 9, b"cat"), MediaSpan(9, 18, b"dog"))),
            CacheKey(LONG, ":", (MediaSpan(0, 9, b"dog"), MediaSpan(9, 18, b"cat"))),
            0,
        ),
        (
            CacheKey(LONG, ":", (tenant_span(3 * BLOCK_TOKENS, "a"),)),
            CacheKey(LONG, ":", (tenant_span(3 * BLOCK_TOKENS, "b"),)),
            3,
        ),
    ],
)
def test_block_hashes_agree_where_kv_may_be_shared(one, other, common):
    a, b = block_hashes(one), block_hashes(other)

    assert a[:common].tolist() == b[:common].tolist()
    assert not set(a[common:].tolist()) & set(b[common:].tolist())


def test_the_curve_counts_hits_that_can_happen_only():
    world, explain = start(pages=400)
    for number, salt in enumerate(["one", "two", "one", "one"]):
        run(world, str(number), LONG, cache_salt=salt)
    run(world, "adapted", LONG, cache_salt="one", lora="adapter")
    for rid, salt in (("public", "three"), ("public too", "four")):
        run(world, rid, LONG, cache_salt=salt, shared_tokens=2 * BLOCK_TOKENS)

    [(_, rate)] = hit_curve(explain.prompts(), [1600])
    blocks = 4 * 7
    assert rate == (4 * 2 + 2) / blocks
    cached = sum(explain.explain(rid)["cached_tokens"] + 1 for rid in ("2", "3"))
    cached += explain.explain("public too")["cached_tokens"]
    assert rate == cached / (blocks * BLOCK_TOKENS)  # the scheduler found those very tokens

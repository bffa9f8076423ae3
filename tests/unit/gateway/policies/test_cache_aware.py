from __future__ import annotations

import random
from array import array

import pytest

from sylvan.config.route import RoutingConfig
from sylvan.gateway import policies
from sylvan.gateway.policies.api import PlacementOutcome, PolicyParts, RoutingRequest
from sylvan.gateway.policies.cache_aware import MANY, RUNNING_TOKENS
from sylvan.gateway.prefixes.blocks import BlockIndex
from sylvan.gateway.prefixes.events import BlockStored
from sylvan.gateway.workers.registry import Registry
from sylvan.utils.clock import VirtualClock
from sylvan.utils.plugins import load
from tests.support.gateway import make_policy, make_worker

SYSTEM = "You are a helpful assistant who answers at length. " * 40


@pytest.fixture
def registry():
    made = Registry()
    for number in range(3):
        made.add(make_worker(number, VirtualClock()))
    return made


def ask(text, namespace=""):
    return RoutingRequest(prompt=text.encode(), namespace=namespace)


def test_a_prefix_leads_back_to_its_worker(registry):
    policy = make_policy("cache_aware")
    first = policy.select(registry.workers, ask(SYSTEM + "one"))
    first.worker.begin(first.new_tokens).answered()

    again = policy.select(registry.workers, ask(SYSTEM + "two"))

    assert again.worker is first.worker
    assert again.branch == "hit"
    assert again.new_tokens < first.new_tokens / 20


def test_a_prefix_attracts_no_more_than_it_saves(registry):
    policy = make_policy("cache_aware")
    first = policy.select(registry.workers, ask(SYSTEM)).worker
    saved = len(SYSTEM) // 4
    for _ in range(saved // RUNNING_TOKENS + 2):
        first.begin()

    assert policy.select(registry.workers, ask(SYSTEM)).worker is not first


def test_a_queue_of_prompts_repels(registry):
    policy = make_policy("cache_aware")
    first = policy.select(registry.workers, ask(SYSTEM)).worker
    waiting = first.begin(100_000)
    assert policy.select(registry.workers, ask(SYSTEM + "x")).worker is not first

    waiting.answered()
    waiting.close()

    assert policy.select(registry.workers[:1], ask(SYSTEM)).worker is first


def test_namespaces_share_nothing(registry):
    policy = make_policy("cache_aware")
    policy.select(registry.workers, ask(SYSTEM, "acme"))

    assert policy.select(registry.workers, ask(SYSTEM, "acme")).branch == "hit"
    assert policy.select(registry.workers, ask(SYSTEM, "other")).branch == "miss"


def test_a_forgotten_worker_attracts_nothing(registry):
    policy = make_policy("cache_aware")
    first = policy.select(registry.workers, ask(SYSTEM)).worker
    policy.forget(first)

    assert policy.select(registry.workers, ask(SYSTEM)).branch == "miss"


def test_distinct_prompts_spread_over_idle_workers(registry):
    policy = make_policy("cache_aware")
    prompts = [chr(97 + i) * 4000 for i in range(3)]

    chosen = {policy.select(registry.workers, ask(prompt)).worker.id for prompt in prompts}

    assert len(chosen) == 3


def test_the_tree_holds_no_more_than_the_cache_of_a_worker(registry):
    policy = make_policy("cache_aware")
    only = registry.workers[:1]
    only[0].found.capacity_tokens = 2000
    for i in range(10):
        request = ask(f"{i}" * 4000)
        placement = policy.select(only, request)
        policy.completed(placement, request, PlacementOutcome(success=True, prompt_tokens=1000))

    assert policy.tree.held_bytes(only[0].id) <= 2000 * 4 + 32
    assert policy.select(only, ask("9" * 4000)).branch == "hit"
    assert policy.select(only, ask("0" * 4000)).branch == "miss"


def test_bytes_of_a_token_are_learnt(registry):
    policy = make_policy("cache_aware")
    request = ask("\u00e9" * 2000)
    for _ in range(400):
        placement = policy.select(registry.workers, request)
        policy.completed(placement, request, PlacementOutcome(success=True, prompt_tokens=4000))

    policy.forget(placement.worker)
    for worker in registry.workers:
        policy.forget(worker)
    assert policy.select(registry.workers, request).new_tokens == pytest.approx(4000, rel=0.01)


@pytest.fixture
def thresholds():
    return make_policy("cache_aware", balance_abs_threshold=4)


def test_with_thresholds_the_best_match_wins(registry, thresholds):
    first = thresholds.select(registry.workers, ask(SYSTEM)).worker
    for _ in range(4):
        first.begin()

    assert thresholds.select(registry.workers, ask(SYSTEM + "x")).worker is first


def test_with_thresholds_a_gross_imbalance_goes_to_the_least_loaded(registry, thresholds):
    first = thresholds.select(registry.workers, ask(SYSTEM)).worker
    for _ in range(5):
        first.begin()

    placed = thresholds.select(registry.workers, ask(SYSTEM + "x"))

    assert placed.worker is not first
    assert placed.branch == "balanced"


def test_with_thresholds_a_poor_match_goes_to_the_smallest_tree(registry, thresholds):
    chosen = [thresholds.select(registry.workers, ask(c * 4000)).worker.id for c in "abc"]

    assert sorted(chosen) == sorted(worker.id for worker in registry.workers)


def followed(registry):
    """A policy that knows what the workers hold, and of which they said so."""
    blocks = BlockIndex(1 << 20)
    for worker in registry.workers:
        blocks.begin(worker.id)
        blocks.apply(worker.id, BlockStored([0], [0] * 4, 4), plain=False)
    parts = PolicyParts(config=RoutingConfig(), clock=VirtualClock(), blocks=blocks)
    return load(policies, "cache_aware").create(parts), blocks


def tokens(*ids, namespace="/"):
    return RoutingRequest(prompt=array("i", ids).tobytes(), namespace=namespace, token_ids=ids)


def test_what_workers_say_wins_over_what_they_were_given(registry):
    policy, blocks = followed(registry)
    prompt = tuple(range(100, 500))
    given = policy.select(registry.workers, tokens(*prompt))
    policy.completed(given, tokens(*prompt), PlacementOutcome(success=True))
    other = next(w for w in registry.workers if w is not given.worker)
    hashes = list(range(1, 101))
    blocks.apply(other.id, BlockStored(hashes, list(prompt), 4), plain=False)

    found = policy.select(registry.workers, tokens(*prompt))

    assert found.worker is other
    assert (found.branch, found.new_tokens) == ("hit", 1)


def test_prompts_that_are_computed_now_count_as_held(registry):
    policy, blocks = followed(registry)
    prompt = tuple(range(100, 500))
    first = policy.select(registry.workers, tokens(*prompt))
    again = policy.select(registry.workers, tokens(*prompt, 7))
    assert again.worker is first.worker
    assert again.new_tokens == 1

    for placement in (first, again):
        policy.completed(placement, tokens(*prompt), PlacementOutcome(success=True))
    later = policy.select(registry.workers, tokens(*prompt))
    assert later.branch == "miss"  # no event has said that it is held
    blocks.check()


def test_namespaces_and_unknown_ids_are_estimated(registry):
    policy, _ = followed(registry)
    prompt = tuple(range(100, 500))
    first = policy.select(registry.workers, tokens(*prompt, namespace="tenant/"))
    policy.completed(first, tokens(*prompt), PlacementOutcome(success=True))

    assert first.promise is None
    again = policy.select(registry.workers, tokens(*prompt, namespace="tenant/"))
    assert (again.worker, again.branch) == (first.worker, "hit")
    odd = RoutingRequest(prompt=b"x" * 64, namespace="/", token_ids=[1, 2**70])
    assert policy.select(registry.workers, odd).promise is None


@pytest.mark.parametrize("seed", range(5))
def test_many_workers_looked_at_at_once_are_chosen_as_one_by_one(seed):
    """Lists of the same workers that are new each time are looked at one by one."""
    rng = random.Random(seed)
    workers = [
        make_worker(n, VirtualClock(), cost=rng.choice([1.0, 1.0, 1.5])) for n in range(MANY)
    ]
    at_once, singly = make_policy("cache_aware"), make_policy("cache_aware")
    dispatches = []

    for number in range(300):
        text = SYSTEM[: rng.choice([0, 20, 400, 1600])] + f"{rng.randrange(8)} and so on " * 9
        found = at_once.select(workers, ask(text, "ab"[number % 2]))
        expected = singly.select([*workers], ask(text, "ab"[number % 2]))

        assert (found.worker, found.new_tokens, found.branch) == (
            expected.worker,
            expected.new_tokens,
            expected.branch,
        )
        dispatches.append(found.worker.begin(found.new_tokens))
        for _ in range(rng.randrange(3)):
            dispatch = rng.choice(dispatches)
            rng.choice([dispatch.answered, dispatch.close])()
        other = rng.choice(workers)
        if number % 2:
            other.record_peer_load(7, 2, 300)
        else:
            other.record_foreign_load(rng.randrange(9))
    assert len(workers[0].on_counts) == 1


def test_workers_of_an_old_list_are_followed_no_more():
    first = [make_worker(n, VirtualClock()) for n in range(MANY)]
    policy = make_policy("cache_aware")
    for _ in range(2):
        policy.select(first, ask("x"))
    fewer = [*first[1:], make_worker(MANY, VirtualClock())]
    for _ in range(2):
        policy.select(fewer, ask("x"))

    assert [len(worker.on_counts) for worker in (first[0], *fewer)] == [0] + [1] * MANY

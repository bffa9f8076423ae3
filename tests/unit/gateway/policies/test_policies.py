from __future__ import annotations

from collections import Counter

import pytest

from sylvan.gateway import policies
from sylvan.gateway.policies.api import RoutingRequest
from sylvan.gateway.policies.bucket import borders
from sylvan.gateway.workers.registry import Registry
from sylvan.utils.clock import VirtualClock
from sylvan.utils.plugins import options
from tests.support.gateway import make_policy, make_worker


@pytest.fixture
def clock():
    return VirtualClock()


@pytest.fixture
def registry(clock):
    made = Registry()
    for number in range(4):
        made.add(make_worker(number, clock))
    return made


def request(text="", key=""):
    return RoutingRequest(prompt=text.encode(), key=key)


def test_every_policy_of_the_reference_is_there():
    assert set(options(policies)) == {
        "bucket",
        "cache_aware",
        "consistent_hashing",
        "manual",
        "power_of_two",
        "prefix_hash",
        "random",
        "round_robin",
    }


@pytest.mark.parametrize("name", options(policies))
def test_each_chooses_among_those_offered_and_forgets_those_who_left(name, registry, clock):
    policy = make_policy(name, registry, clock)
    workers = list(registry.workers)
    for turn in range(60):
        offered = workers[turn % 3 :]
        placed = policy.select(offered, request("x" * turn * 40, f"user-{turn % 7}"))
        assert placed.worker in offered
        assert 0 <= placed.new_tokens <= turn * 10 + 1
        if turn == 30:
            registry.remove(workers[0])
            policy.forget(workers[0])
            workers = workers[1:]


@pytest.mark.parametrize("name", options(policies))
def test_each_can_choose_from_one(name, registry, clock):
    policy, only = make_policy(name, registry, clock), registry.workers[:1]

    assert policy.select(only, request()).worker is only[0]
    assert policy.select(only, request("text", "key")).worker is only[0]


def test_round_robin_takes_turns(registry):
    policy = make_policy("round_robin", registry)

    chosen = [policy.select(registry.workers, request()).worker.id for _ in range(8)]

    assert chosen == [worker.id for worker in registry.workers] * 2


def test_random_spreads_evenly(registry):
    policy = make_policy("random", registry)

    counts = Counter(policy.select(registry.workers, request()).worker.id for _ in range(4000))

    assert all(900 < count < 1100 for count in counts.values())


def test_power_of_two_never_takes_the_busiest(registry):
    policy, busy = make_policy("power_of_two", registry), registry.workers[2]
    for _ in range(10):
        busy.begin()

    assert all(policy.select(registry.workers, request()).worker is not busy for _ in range(100))


def test_cost_makes_a_worker_look_busier(registry, clock):
    policy = make_policy("power_of_two", registry)
    slow, fast = make_worker(8, clock, cost=10.0), make_worker(9, clock)
    slow.begin()
    for _ in range(5):
        fast.begin()

    assert policy.select([slow, fast], request()).worker is fast


def test_keys_keep_their_worker_and_find_another_when_it_fails(registry):
    policy = make_policy("consistent_hashing", registry)
    own = {
        key: policy.select(registry.workers, request(key=key)).worker for key in map(str, range(50))
    }
    assert len(set(own.values())) > 1
    for key, worker in own.items():
        assert policy.select(registry.workers, request(key=key)).worker is worker
        others = [w for w in registry.workers if w is not worker]
        placed = policy.select(others, request(key=key))
        assert placed.worker is not worker
        assert placed.branch == "passed_on"


def test_without_a_key_hashing_takes_the_least_loaded(registry):
    policy = make_policy("consistent_hashing", registry)
    for worker in registry.workers[1:]:
        worker.begin()

    assert policy.select(registry.workers, request("text")).worker is registry.workers[0]


def test_prefixes_decide_until_their_worker_is_overloaded(registry):
    policy = make_policy("prefix_hash", registry, prefix_tokens=3, load_factor=1.25)
    first = policy.select(registry.workers, request("the same start, one end")).worker
    again = policy.select(registry.workers, request("the same start, another end"))
    assert again.worker is first
    assert again.branch == "own"

    for _ in range(8):
        first.begin()

    moved = policy.select(registry.workers, request("the same start, third end"))
    assert moved.worker is not first
    assert moved.branch == "passed_on"


@pytest.mark.parametrize("assignment", ["random", "min_load", "min_group"])
def test_manual_keys_stick(registry, clock, assignment):
    policy = make_policy("manual", registry, clock, assignment=assignment)
    own = {k: policy.select(registry.workers, request(key=k)).worker for k in "abcdefgh"}
    if assignment == "min_group":
        assert set(Counter(w.id for w in own.values()).values()) == {2}

    for key, worker in own.items():
        worker.begin()
        placed = policy.select(registry.workers, request(key=key))
        assert (placed.worker, placed.branch) == (worker, "sticky")


def test_manual_keys_move_when_their_worker_is_gone(registry, clock):
    policy = make_policy("manual", registry, clock, assignment="min_load")
    worker = policy.select(registry.workers, request(key="k")).worker
    others = [w for w in registry.workers if w is not worker]

    moved = policy.select(others, request(key="k"))

    assert moved.branch == "moved"
    assert policy.select(registry.workers, request(key="k")).worker is moved.worker


def test_idle_manual_keys_are_forgotten(registry, clock):
    policy = make_policy("manual", registry, clock, max_idle_s=100.0)
    policy.select(registry.workers, request(key="old"))
    clock.advance(60)
    policy.select(registry.workers, request(key="new"))
    clock.advance(60)
    assert policy.num_keys == 2

    assert policy.select(registry.workers, request(key="new")).branch == "sticky"
    assert policy.num_keys == 1


def test_buckets_give_each_worker_a_range_of_lengths(registry, clock):
    policy = make_policy("bucket", registry, clock, bucket_adjust_s=1.0)
    lengths = [10] * 400 + [100] * 40 + [400] * 10 + [4000]
    for length in lengths:
        policy.select(registry.workers, request("x" * length * 4))
    clock.advance(2)
    policy.select(registry.workers, request("x" * 40))

    def worker_of(length):
        return policy.select(registry.workers, request("x" * length * 4)).worker.id

    assert worker_of(10) == worker_of(9)
    assert worker_of(10) < worker_of(400) <= worker_of(4000)


def test_buckets_yield_to_a_gross_imbalance(registry, clock):
    policy = make_policy("bucket", registry, clock, balance_abs_threshold=5)
    short = policy.select(registry.workers, request("x" * 40)).worker
    for _ in range(6):
        short.begin()

    placed = policy.select(registry.workers, request("x" * 40))

    assert placed.branch == "balanced"
    assert placed.worker is not short


@pytest.mark.parametrize(
    ("lengths", "number", "wanted"),
    [([1, 1, 1, 1], 2, [1]), ([1] * 8 + [8], 2, [1]), ([], 3, [0, 0]), ([5], 3, [5, 5])],
)
def test_borders_share_tokens(lengths, number, wanted):
    assert borders(lengths, number) == wanted

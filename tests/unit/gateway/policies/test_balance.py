"""Adversarial traces over the real policies in virtual time: no worker attracts a herd."""

from __future__ import annotations

import itertools
import random

import pytest

from sylvan.gateway.policies.cache_aware import RUNNING_TOKENS
from tests.support.gateway import Arrival, ClosedLoop, Cluster, make_worker

PROMPT = b"p" * 8000


def same_prefix(count, gap_s):
    """Every prompt begins with the same 8,000 bytes."""
    return [Arrival(i * gap_s, PROMPT + b"%032d" % i) for i in range(count)]


def zipf(count, gap_s, groups=200, seed=1):
    """Prompts of many groups, a few of which are asked nearly always."""
    rng = random.Random(seed)
    weights = [1 / (rank + 1) ** 1.2 for rank in range(groups)]
    chosen = rng.choices(range(groups), weights, k=count)
    return [
        Arrival(i * gap_s, (b"%08d" % group) * 500 + b"%032d" % i) for i, group in enumerate(chosen)
    ]


def held_to_the_bound(cluster, placement, request):
    """The class's promise: the chosen worker exceeds no other by more than one prompt."""
    workers = cluster.registry.workers
    patience = 1 + sum(worker.load > 0 for worker in workers) / len(workers)
    charges = {w: w.queued_tokens / patience + RUNNING_TOKENS * w.num_running for w in workers}
    assert charges[placement.worker] - min(charges.values()) <= request.num_tokens


@pytest.mark.slow
@pytest.mark.parametrize("trace", [same_prefix, zipf])
@pytest.mark.parametrize(
    ("num_workers", "count", "gap_s"), [(2, 1000, 0.01), (16, 2000, 0.002), (1000, 3000, 0.0001)]
)
def test_cache_aware_keeps_its_bound(trace, num_workers, count, gap_s):
    cluster = Cluster.of("cache_aware", num_workers, watch=held_to_the_bound)

    cluster.run(trace(count, gap_s))

    assert all(w.load == 0 and w.queued_tokens == 0 for w in cluster.registry.workers)
    assert sum(node.served for node in cluster.nodes.values()) == count


def test_one_hot_prefix_uses_all_workers_when_one_is_not_enough():
    cluster = Cluster.of("cache_aware", 16)
    cluster.run(same_prefix(4000, 0.001))

    served = [node.served for node in cluster.nodes.values()]
    assert min(served) > 0.5 * 4000 / 16
    assert max(served) < 2 * 4000 / 16
    assert cluster.hit_rate > 0.95


def test_one_hot_prefix_stays_where_it_is_when_one_is_enough():
    cluster = Cluster.of("cache_aware", 16)
    cluster.run(same_prefix(100, 2.0))

    assert sorted(node.served for node in cluster.nodes.values())[:15] == [0] * 15


def test_the_cache_is_worth_it_and_tails_stay_short():
    """Groups of prefixes, ten of which fit into a worker: what round robin makes of them."""
    rng = random.Random(5)
    trace = [
        Arrival(i * 0.004, (b"%08d" % rng.randrange(64)) * 500 + b"%032d" % i) for i in range(4000)
    ]
    ours, theirs = (
        Cluster.of(name, 8, cache_bytes=40_000, prefill_s=1e-5)
        for name in ("cache_aware", "round_robin")
    )
    ours.run(trace)
    theirs.run(trace)

    assert ours.hit_rate > 3.8 * theirs.hit_rate
    assert max(ours.first_token_s) < max(theirs.first_token_s)


@pytest.mark.parametrize("num_clients", [4, 16, 64])
@pytest.mark.parametrize("shared_cores", [2, 8])
def test_clients_that_wait_for_answers_get_more_of_them(num_clients, shared_cores):
    """System prompts, seven of which fit into a worker: requests a second against taking turns."""
    ours, theirs = (
        ClosedLoop.of(name, num_workers=8, shared_cores=shared_cores)
        for name in ("cache_aware", "round_robin")
    )
    for loop in (ours, theirs):
        loop.run(groups=32, per_group=12, num_clients=num_clients)

    assert ours.hit_rate > 3.8 * theirs.hit_rate
    assert ours.requests_per_s > 1.9 * theirs.requests_per_s


def test_a_lost_worker_spreads_over_the_others():
    cluster = Cluster.of("cache_aware", 8, watch=held_to_the_bound)
    lost = cluster.registry.workers[0]
    cluster.at(1.0, lambda: cluster.registry.remove(lost))

    cluster.run(zipf(2000, 0.002))

    after = [n.served for n in cluster.nodes.values() if n.worker is not lost]
    assert max(after) < 3 * min(after)


def test_a_worker_that_joins_takes_its_share_without_a_herd():
    cluster = Cluster.of("cache_aware", 4, watch=held_to_the_bound)
    cluster.run(same_prefix(400, 0.002))
    newcomer = make_worker(99, cluster.clock)
    cluster.join(newcomer)
    start = cluster.clock()
    before = {worker_id: node.served for worker_id, node in cluster.nodes.items()}

    later = [Arrival(start + a.at_s, a.prompt) for a in same_prefix(400, 0.002)]
    cluster.run(later)

    gained = [n.served - before[i] for i, n in cluster.nodes.items()]
    assert cluster.nodes[newcomer.id].served < 2 * 400 / 5
    assert min(gained) > 0


@pytest.mark.parametrize("name", ["power_of_two", "prefix_hash"])
def test_load_aware_policies_bound_the_load_too(name):
    worst = itertools.count()

    def watch(cluster, placement, request):
        loads = [w.load for w in cluster.registry.workers]
        assert max(loads) <= 1.25 * (sum(loads) + 1) / len(loads) + 8
        next(worst)

    cluster = Cluster.of(name, 64, watch=watch)
    cluster.run(same_prefix(2000, 0.0005))
    assert next(worst) == 2000


def test_memory_of_the_tree_is_bounded_whatever_comes():
    rng = random.Random(3)
    cluster = Cluster.of("cache_aware", 8, config={"max_tree_bytes": 1 << 20})

    def bounded(cluster, placement, request):
        assert cluster.policy.tree.num_bytes <= 1 << 20

    cluster.watch = bounded
    cluster.run(Arrival(i * 1e-3, rng.randbytes(rng.choice([40, 4000]))) for i in range(2000))
    cluster.policy.tree.check()

"""Writes to the store, reads from it, and its faults."""

from __future__ import annotations

import itertools

import pytest

from sylvan.protocol.tiers import ClearStore, DescribeTiers, DetachStore
from sylvan.runtime.cache.types import tenant_span
from sylvan.runtime.features.tiers.cost import LoadCost
from sylvan.runtime.features.tiers.prefetch import PrefetchPolicy
from sylvan.runtime.storage.api import StoreError, StoreLimits
from tests.support.cache_events import follow
from tests.support.kv import World, alone, request
from tests.support.kv_store import StoreBelow

PROMPT = [(3 * i) % 50 for i in range(40)]
names = (f"control-{n}" for n in itertools.count())


def start(name=None, *, page_size=4, pages=40, store=None, **world):
    """A world and what lies below it; `store` are the settings of `StoreBelow`."""
    below = StoreBelow(name or next(names), **(store or {}))
    return World(pages=pages, page_size=page_size, tiers=below, **world), below


def serve(world, below, rid="a", ids=PROMPT, new=3, **fields):
    """One request to its end; prompt tokens that came from the cache."""
    asked = request(rid, ids, new=new, **fields)
    world.scheduler.add(asked)
    below.run(world)
    assert world.tokens[rid] == alone(asked)
    world.check()
    assert world.scheduler.audit() == 0
    return world.outputs[rid][-1].usage.cached_tokens


def test_a_restarted_server_answers_from_the_store():
    world, below = start(name := next(names))
    assert serve(world, below) == 0
    pages = len([*below.store.pages()])
    assert pages == (40 + 2) // 4

    world, below = start(name)
    assert serve(world, below) == 36
    assert world.scheduler.load().computed_tokens == 4 + 2
    assert below.control.counts.loaded_tokens == 36
    assert len([*below.store.pages()]) == pages, "nothing is written twice"


def test_a_prefix_is_shared_between_servers_up_to_where_prompts_part():
    world, below = start(name := next(names))
    serve(world, below)
    other, beneath = start(name)
    assert serve(other, beneath, ids=[*PROMPT[:22], 49, 48, 47, 46, 45]) == 20


def test_what_the_device_forgot_is_loaded_back():
    world, below = start(pages=16)
    serve(world, below)
    serve(world, below, "b", [49 - t for t in PROMPT])
    assert serve(world, below, "c", new=2) == 36
    assert below.control.counts.loaded_tokens >= 16


def test_only_what_a_second_request_used_is_written_selectively():
    world, below = start(store={"write_policy": "write_through_selective"})
    serve(world, below)
    assert not [*below.store.pages()]
    serve(world, below, "b")
    assert len([*below.store.pages()]) == 10


def test_write_back_writes_what_is_next_to_be_evicted():
    world, below = start(store={"write_policy": "write_back"}, pages=64)
    serve(world, below)
    first = len([*below.store.pages()])
    serve(world, below, "b", [49 - t for t in PROMPT])
    serve(world, below, "c", [*PROMPT[1:], 7])
    assert first <= 11
    assert 0 < len([*below.store.pages()]) < 32, "not everything"


@pytest.mark.parametrize("states", [0, 12])
@pytest.mark.parametrize("windows", [(), ((8, 30), (17, 30))])
def test_windows_and_states_come_back_too(windows, states):
    world, below = start(name := next(names), windows=windows, states=states)
    serve(world, below)
    kinds = {page.name.rpartition(".")[2] for page in below.store.pages()}
    expected = {"kv", *(["w0", "w1"] if windows else []), *(["state"] if states else [])}
    assert kinds == expected

    world, below = start(name, windows=windows, states=states)
    assert serve(world, below) == 36
    assert below.control.counts.failed_loads == 0


# ---- namespaces


def test_salts_are_part_of_the_name():
    world, below = start(name := next(names))
    serve(world, below, cache_salt="tenant-a/")
    other, beneath = start(name)
    assert serve(other, beneath, "b", cache_salt="tenant-b/") == 0
    assert serve(other, beneath, "c") == 0
    assert serve(other, beneath, "d", cache_salt="tenant-a/") == 36
    assert tenant_span(0, "x").digest != tenant_span(0, "y").digest


def test_a_public_start_is_shared_and_the_rest_is_not():
    world, below = start(name := next(names))
    serve(world, below, cache_salt="tenant-a/", shared_tokens=20)
    other, beneath = start(name)
    assert serve(other, beneath, "b", cache_salt="tenant-b/", shared_tokens=20) == 20
    spaces = {page.name.partition("/")[0] for page in beneath.store.pages()}
    assert len(spaces) == 3


ADAPTER = "french@0123456789abcdef"


def test_kv_of_an_adapter_is_found_by_its_contents():
    world, below = start(name := next(names))
    serve(world, below, lora=ADAPTER)
    other, beneath = start(name)
    assert serve(other, beneath, "b", lora="french@fedcba9876543210") == 0
    assert serve(other, beneath, "c") == 0
    assert serve(other, beneath, "d", lora=ADAPTER) == 36
    assert serve(other, beneath, "e", lora=ADAPTER, cache_salt="tenant-a/") == 0


def test_kv_of_an_adapter_without_a_digest_is_not_stored():
    world, below = start()
    serve(world, below, lora="adapter")
    assert not [*below.store.pages()]
    serve(world, below, "b")
    assert [*below.store.pages()]


# ---- the host tier


OTHER = [49 - token for token in PROMPT]


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("states", [0, 12])
@pytest.mark.parametrize("windows", [(), ((8, 30), (17, 30))])
def test_what_the_device_evicted_comes_back_from_host_memory(windows, states, attached):
    store = {"host_pages": 60, "attached": attached}
    world, below = start(pages=16, windows=windows, states=states, store=store)
    serve(world, below)
    serve(world, below, "b", OTHER)
    counts = below.control.counts
    fetches = counts.fetches
    assert serve(world, below, "c", new=2) == 36
    assert counts.host_loaded_tokens == 16
    assert (counts.loaded_tokens, counts.failed_loads, counts.fetches) == (0, 0, fetches)
    usage = world.outputs["c"][-1].usage
    assert (usage.host_tokens, usage.loaded_tokens) == (16, 0)
    assert bool([*below.store.pages()]) == attached, "and goes further down"


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_all_policies_fill_the_host_tier(policy):
    store = {"host_pages": 60, "attached": False, "write_policy": policy}
    world, below = start(pages=24, store=store)
    serve(world, below)
    assert bool(below.host.used_pages) == (policy != "write_through_selective")
    serve(world, below, "b")
    for number in range(4):
        serve(world, below, f"other-{number}", [(7 * t + number) % 50 for t in PROMPT])
    cached = serve(world, below, "c")
    if policy != "write_back":  # which is as far ahead as an eighth of 24 pages is
        assert cached == 36
    assert below.control.counts.host_loaded_tokens > 0


def test_a_full_host_tier_forgets_what_was_used_longest_ago():
    world, below = start(pages=16, store={"host_pages": 20, "attached": False})
    serve(world, below)
    serve(world, below, "b", OTHER)
    serve(world, below, "c", [*PROMPT[1:], 7])
    serve(world, below, "d", [*OTHER[1:], 7])
    assert below.host.used_pages <= 20
    assert serve(world, below, "e") < 36
    assert serve(world, below, "f", [*OTHER[1:], 7]) == 36


def test_what_the_host_forgot_is_read_from_the_store():
    world, below = start(pages=16, store={"host_pages": 20})
    serve(world, below)
    for number in range(4):
        serve(world, below, f"other-{number}", [(7 * t + number) % 50 for t in PROMPT])
    assert serve(world, below, "c") == 36
    assert below.control.counts.loaded_tokens > 0


def test_a_prefix_comes_from_three_places_at_once():
    """The device has its start, the host some pages more, and another server stored the rest."""
    other, beneath = start(name := next(names))
    serve(other, beneath, ids=[*PROMPT, *OTHER])
    store = {"host_pages": 60}
    world, below = start(name, pages=30, store=store)
    serve(world, below)
    below.control.counts.loaded_tokens = 0
    serve(world, below, "b", [(7 * t) % 50 for t in range(80)], new=2)
    assert serve(world, below, "c", [*PROMPT, *OTHER]) == 76
    counts = below.control.counts
    assert counts.host_loaded_tokens > 0
    assert counts.loaded_tokens > 0
    assert counts.host_loaded_tokens + counts.loaded_tokens < 76


def test_a_host_tier_that_is_slower_than_computing_is_left_alone():
    world, below = start(pages=16, store={"host_pages": 60, "attached": False})
    serve(world, below)
    serve(world, below, "b", OTHER)
    cost = below.control.host_cost
    cost.tokens_per_s, cost.bytes_per_s = 1e6, cost.token_bytes
    assert serve(world, below, "c", new=2) == 20
    assert below.control.counts.host_loaded_tokens == 0


def test_a_node_larger_than_the_host_tier_goes_to_the_store():
    whole = {"max_batch_tokens": 64, "chunk_tokens": 64}
    world, below = start(pages=16, store={"host_pages": 4}, **whole)
    serve(world, below)
    assert below.host.used_pages == 0
    assert len([*below.store.pages()]) == 10


def test_a_prefix_that_no_tier_has_room_for_leaves_the_scheduler_idle():
    world, below = start(store={"host_pages": 6, "max_known": 7})
    for turn in range(1, 6):
        serve(world, below, f"turn-{turn}", PROMPT[: 8 * turn], new=1)
    assert world.scheduler.idle
    serve(world, below, "other", OTHER[:16])
    assert below.host.used_pages == 6, "what came later was written"


def test_events_report_the_host_tier():
    world, below = start(pages=16, store={"host_pages": 60, "attached": False})
    world.tree.record_events()
    serve(world, below)
    serve(world, below, "b", OTHER)
    there = follow(world.tree.take_events(), 4, {})
    assert len(there["HOST"]) == below.host.used_pages == 20
    assert len(there["DEVICE"]) == world.tree.total_pages - 1, "the last one is not whole"
    world.scheduler.flush_cache()
    there = follow(world.tree.take_events(), 4, there)
    assert there == {"HOST": set(), "DEVICE": set()}


def test_replaced_weights_find_nothing_in_host_memory():
    world, below = start(pages=16, store={"host_pages": 60, "attached": False})
    serve(world, below)
    assert below.host.used_pages
    assert world.scheduler.flush_cache()
    assert below.host.used_pages == 0
    assert serve(world, below, "b") == 0


# ---- waiting


def queue_one(below, world, rid="b", **fields):
    world.scheduler.add(request(rid, PROMPT, new=3, **fields))


def test_best_effort_waits_for_nothing():
    name = next(names)
    serve(*start(name))
    best = PrefetchPolicy(wait="best_effort", min_tokens=1)
    world, below = start(name, store={"prefetch": best})
    assert serve(world, below) == 0
    assert below.control.counts.fetches == 1

    world, below = start(name, store={"prefetch": best}, max_running_reqs=1)
    world.scheduler.add(request("first", [9] * 8, new=30))
    world.scheduler.step()
    queue_one(below, world)
    below.run(world)
    assert world.outputs["b"][-1].usage.cached_tokens == 36, "read while it waited"


def test_a_request_waits_for_its_time_and_then_takes_what_has_arrived():
    name = next(names)
    serve(*start(name))
    timed = PrefetchPolicy(wait="timeout", min_tokens=1, timeout_s=0.5, timeout_per_ki_token_s=0)
    world, below = start(name, store={"prefetch": timed})
    queue_one(below, world)
    for _ in range(3):
        world.scheduler.step()
    below.calls.run()  # the lookup
    for _ in range(2):
        below.calls.run()  # three pages of nine
    for _ in range(5):
        world.scheduler.step()
    assert not world.scheduler.running
    world.clock.advance(1.0)
    for _ in range(9):
        world.scheduler.step()
        below.calls.run(-1)  # the load comes after reads that were given up
        below.copies.run()
    below.run(world)
    assert world.outputs["b"][-1].usage.cached_tokens == 24
    assert below.control.counts.unfulfilled_tokens == 12
    assert world.tokens["b"] == alone(request("b", PROMPT, new=3))


def test_storage_that_was_faster_is_not_waited_for_until_the_time_is_up():
    name = next(names)
    serve(*start(name))
    timed = PrefetchPolicy(wait="timeout", min_tokens=1, timeout_s=9.0)
    world, below = start(name, store={"prefetch": timed})
    cost = below.control.cost
    cost.tokens_per_s, cost.bytes_per_s = 40.0, 320 * cost.token_bytes
    below.calls.submit = lambda call: None  # nothing ever happens
    queue_one(below, world)
    waited = 0
    while "b" not in world.finish and not world.scheduler.running:
        assert not waited or below.control.wants_step_soon()
        world.clock.advance(0.01)
        world.scheduler.step()
        waited += 1
    assert 20 < waited < 40, "twice the eighth of a second that reading 36 tokens was to take"
    while "b" not in world.finish:
        world.clock.advance(0.05)
        world.scheduler.step()
    assert world.tokens["b"] == alone(request("b", PROMPT, new=3))


def test_how_late_a_fetch_may_be():
    cost = LoadCost(10.0)
    assert cost.late_s(1000) == 0.0, "nothing was measured"
    cost.computed(1000, 10.0)
    assert cost.late_s(1000) == 0.0
    cost.fetched(10_000, 2.0)
    assert cost.late_s(1000) == pytest.approx(2 * 2.0)
    cost.fetched(10_000_000, 0.1)
    assert cost.late_s(1000) == pytest.approx(0.1 * 10.0), "a tenth of computing is little"
    assert cost.late_s(10) == 0.1


def test_storage_that_hangs_holds_a_request_up_for_its_time_only():
    name = next(names)
    serve(*start(name))
    timed = PrefetchPolicy(wait="timeout", min_tokens=1, timeout_s=1.0)
    world, below = start(name, store={"prefetch": timed})
    below.calls.submit = lambda call: None  # nothing ever happens
    for turn in range(6):
        queue_one(below, world, f"r{turn}", cache_salt=f"{turn}/")
        steps = 0
        while f"r{turn}" not in world.finish:
            world.clock.advance(0.05)
            world.scheduler.step()
            steps += 1
        assert steps < 60
        assert world.tokens[f"r{turn}"] == alone(request("x", PROMPT, cache_salt=f"{turn}/", new=3))
    assert below.control.breaker.is_open
    assert steps < 15, "the last ones did not wait"


def test_requests_for_the_same_prefix_read_it_once():
    name = next(names)
    serve(*start(name))
    world, below = start(name)
    for number in range(3):
        queue_one(below, world, f"r{number}")
    below.run(world)
    cached = [world.outputs[f"r{n}"][-1].usage.cached_tokens for n in range(3)]
    assert cached[0] == 36
    assert min(cached) >= 36
    assert below.control.counts.fetched_tokens == 36


def test_who_waited_for_a_shared_start_reads_the_rest_of_its_own():
    world, below = start(name := next(names), pages=60)
    tails = [[*PROMPT[:20], *((7 * i + n) % 50 for i in range(20))] for n in range(4)]
    for n, ids in enumerate(tails):
        serve(world, below, f"a{n}", ids)

    world, below = start(name, pages=60)
    for n, ids in enumerate(tails):
        world.scheduler.add(request(f"b{n}", ids, new=3))
    below.run(world)
    found = [world.outputs[f"b{n}"][-1].usage.cached_tokens for n in range(4)]
    assert found == [36] * 4
    assert below.control.counts.fetched_tokens == 36 + 3 * 16, "the shared start is read once"


def test_requests_that_displace_each_other_find_all_of_their_prompts():
    world, below = start(pages=15)
    chats = [[(3 * i + n) % 50 for i in range(40)] for n in range(5)]
    for turn in range(3):
        for n, chat in enumerate(chats):
            world.scheduler.add(request(f"{turn}-{n}", chat, new=3))
        below.run(world)
    found = [
        world.outputs[f"{turn}-{n}"][-1].usage.cached_tokens for turn in (1, 2) for n in range(5)
    ]
    assert min(found) >= 36


def test_a_request_that_is_gone_reads_no_more():
    name = next(names)
    serve(*start(name))
    world, below = start(name)
    queue_one(below, world)
    world.scheduler.step()
    below.calls.run()
    world.scheduler.abort("b")
    below.run(world)
    assert world.scheduler.idle
    assert below.control.counts.loaded_tokens == 0
    world.check_empty()


# ---- stores that misbehave


def spoil(kind):
    def change(name, record):
        match kind:
            case "lost":
                return None
            case "torn":
                return record[:-3]
            case "flipped":
                return record[:-1] + bytes([record[-1] ^ 1])
            case _:
                return b"<html>not found</html>"

    return change


@pytest.mark.parametrize("kind", ["lost", "torn", "flipped", "garbage"])
@pytest.mark.parametrize("after", [0, 5])
def test_wrong_records_are_never_used(kind, after):
    name = next(names)
    serve(*start(name))
    world, below = start(name)
    change, reads = spoil(kind), itertools.count()
    below.store.spoil = lambda n, record: change(n, record) if next(reads) >= after else record
    assert serve(world, below) == 4 * after
    assert bool(below.control.counts.faults) == (kind != "lost")
    below.store.spoil = lambda n, record: record


def test_a_store_that_fails_is_left_alone_for_a_while():
    world, below = start()
    calls = []

    def fail(method, name):
        calls.append(method)
        raise StoreError("broken")

    below.store.fault = fail
    for turn in range(8):
        serve(world, below, f"r{turn}", cache_salt=f"{turn}/")
    assert below.control.breaker.is_open
    assert below.stores.describe()["last_error"] == "broken"
    assert below.control.counts.lost_pages > 0
    before = len(calls)
    serve(world, below, "last", cache_salt="z/")
    assert "contains" not in calls[before:]

    below.store.fault = lambda method, name: None
    world.clock.advance(120.0)
    serve(world, below, "again", cache_salt="y/")
    assert not below.control.breaker.is_open


def test_a_full_store_costs_hits_only():
    world, below = start(store={"limits": StoreLimits(max_bytes=400)})
    serve(world, below)
    assert 0 < len([*below.store.pages()]) < 10
    serve(world, below, "b", cache_salt="x/")


def begin_export(world, below):
    """Serve a request up to where its pages are being copied for the store."""
    world.scheduler.add(request("a", PROMPT, new=3))
    while "a" not in world.finish:
        world.scheduler.step()
        below.calls.run()
    for _ in range(3):
        world.scheduler.step()
    assert below.copies.calls, "an export has begun"


def test_pages_given_to_others_while_they_are_copied_are_copied_before_the_step():
    world, below = start(pages=12)
    begin_export(world, below)
    world.scheduler.add(request("b", [49 - t for t in PROMPT], new=3))
    while "b" not in world.finish:
        world.scheduler.step()
        below.calls.run()
    below.run(world)
    other, beneath = start(below.url.partition(":")[2])
    assert serve(other, beneath) == 36
    serve(other, beneath, "b", [49 - t for t in PROMPT])


def test_what_is_cleared_while_it_is_copied_is_not_written():
    world, below = start()
    begin_export(world, below)
    assert world.scheduler.flush_cache()
    below.run(world)
    assert not [*below.store.pages()]


def test_no_chat_loses_a_page_to_the_next_one():
    world, below = start(pages=15)
    chats = [[(3 * i + n) % 50 for i in range(40)] for n in range(5)]
    for n, chat in enumerate(chats):
        world.scheduler.add(request(f"first-{n}", chat, new=3))
    below.run(world)
    assert len([*below.store.pages()]) == 5 * 10
    for n, chat in enumerate(chats):
        assert serve(world, below, f"again-{n}", chat) == 36


# ---- operation


def test_a_store_is_attached_described_cleared_and_detached_while_serving():
    world, below = start(store={"attached": False})
    assert serve(world, below) == 0
    assert not below.command(world, DetachStore()).ok
    assert below.command(world, DescribeTiers()).body["storage"] is None

    reply = below.attach(world, write_policy="write_back", prefetch="best_effort")
    assert reply.ok
    assert reply.body["storage"] == below.url
    assert reply.body["write_policy"] == "write_back"
    assert reply.body["prefetch"]["wait"] == "best_effort"
    again = below.attach(world)
    assert (again.ok, again.status) == (False, 400)
    assert "detach it first" in again.message

    assert below.command(world, DetachStore()).ok
    below.attach(world, write_policy="write_through", prefetch="wait_complete")
    serve(world, below, "b", new=8)
    assert [*below.store.pages()]
    assert below.command(world, ClearStore()).ok
    assert not [*below.store.pages()]
    assert below.stores.describe()["attached"]
    serve(world, below, "c", [7, *PROMPT])
    assert [*below.store.pages()]

    pages = len([*below.store.pages()])
    assert below.command(world, DetachStore()).ok
    assert not below.tier.is_open
    assert not below.tier.known
    serve(world, below, "d", [8, *PROMPT])
    assert len([*below.store.pages()]) == pages


def test_a_store_of_another_model_is_not_attached():
    world, below = start()
    serve(world, below)
    other, beneath = start(page_size=8, store={"attached": False})
    reply = beneath.attach(other, url=below.url)
    assert (reply.ok, reply.status) == (False, 400)
    assert "page_size is 4, not 8" in reply.message
    assert serve(other, beneath) == 0


def test_replaced_weights_find_nothing_of_the_old_ones():
    world, below = start(name := next(names))
    serve(world, below)
    world.scheduler.pause("in_place")
    world.scheduler.forget_kv()
    below.stores.weights_changed()
    world.scheduler.resume()
    assert serve(world, below, "b") == 0
    world.cache.clear()
    assert serve(world, below, "c") == 36, "of the new ones"

    world, below = start(name)
    assert serve(world, below) == 36, "a new server has the old weights"

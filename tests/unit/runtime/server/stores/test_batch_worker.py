"""The worker of batches when requests, the store or the clock fail it."""

from __future__ import annotations

import asyncio
import json

import pytest

from sylvan.runtime.server.stores.batch_worker import BatchWorker
from sylvan.runtime.server.stores.batches import BatchStore, Item

NOW_S = 1000.0


@pytest.fixture
def store(tmp_path):
    made = BatchStore(str(tmp_path))
    yield made
    made.close()


def new_batch(store: BatchStore, size: int, tenant: str = "acme", name: str = "batch") -> None:
    state = {
        "id": name,
        "endpoint": "/v1/completions",
        "status": "in_progress",
        "created_at": 0,
        "expires_at": NOW_S + 60,
        "output_file_id": None,
        "error_file_id": None,
        "errors": None,
    }
    store.add_batch(tenant, state, [Item(i, f"r{i}", "{}") for i in range(size)])


async def ended(store: BatchStore) -> dict:
    while store.unfinished():
        await asyncio.sleep(0.001)
    found = store.batch("batch", "acme")
    assert found is not None
    return found


def lines_of(store: BatchStore, name: str | None) -> dict[str, dict]:
    assert name is not None
    return {
        line["custom_id"]: line for line in map(json.loads, store.files.content(name).splitlines())
    }


async def good(tenant, endpoint, body):
    await asyncio.sleep(0)
    return 200, {"ok": True}


async def test_a_store_that_fails_for_good_fails_the_batch_with_an_entry_for_each_line(store):
    new_batch(store, 40)
    calls = 0

    async def execute(tenant, endpoint, body):
        nonlocal calls
        calls += 1
        if calls == 20:
            raise ZeroDivisionError  # breaks the promise of Execute
        return await good(tenant, endpoint, body)

    worker = BatchWorker(store, lambda: NOW_S)
    worker.begin(execute)
    state = await ended(store)

    assert state["status"] == "failed"
    assert state["errors"]["data"][0]["code"] == "internal_error"
    answers = lines_of(store, state["output_file_id"])
    faults = lines_of(store, state["error_file_id"])
    assert set(answers) | set(faults) == {f"r{i}" for i in range(40)}
    assert not set(answers) & set(faults)
    assert {line["error"]["code"] for line in faults.values()} == {"internal_error"}


async def test_lines_that_were_not_answered_in_time_are_named(store):
    new_batch(store, 3)
    now_s = NOW_S

    async def execute(tenant, endpoint, body):
        nonlocal now_s
        await asyncio.Event().wait()

    worker = BatchWorker(store, lambda: now_s)
    state = store.batch("batch", "acme")
    store.save_batch("acme", {**state, "expires_at": NOW_S})
    worker.begin(execute)
    state = await ended(store)

    assert state["status"] == "expired"
    faults = lines_of(store, state["error_file_id"])
    assert {n: line["error"]["code"] for n, line in faults.items()} == {
        f"r{i}": "batch_expired" for i in range(3)
    }


async def test_a_batch_waits_for_room_and_continues(store, tmp_path):
    new_batch(store, 20)
    database = store._database
    [pages] = database.run(lambda db: db.execute("PRAGMA page_count").fetchone())
    database.run(lambda db: db.execute(f"PRAGMA max_page_count = {pages}"))  # the disk is full

    async def execute(tenant, endpoint, body):
        return 200, {"text": "x" * 10_000}

    worker = BatchWorker(store, lambda: NOW_S, retry_s=0.01)
    worker.begin(execute)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(ended(store), 0.2)
    database.run(lambda db: db.execute("PRAGMA max_page_count = 1000000"))  # and has room again
    state = await ended(store)

    assert state["status"] == "completed"
    assert len(lines_of(store, state["output_file_id"])) == 20


async def test_tenants_take_turns(store):
    new_batch(store, 400)
    order: list[str] = []

    async def execute(tenant, endpoint, body):
        order.append(tenant)
        return await good(tenant, endpoint, body)

    worker = BatchWorker(store, lambda: NOW_S)
    worker.begin(execute)
    while len(order) < 40:
        await asyncio.sleep(0)
    new_batch(store, 20, "bravo", "late")
    worker.wake()
    while "bravo" not in order:
        await asyncio.sleep(0)
    await ended(store)

    theirs = [i for i, tenant in enumerate(order) if tenant == "bravo"]
    assert len(order) == 420
    assert order[theirs[-1] :].count("acme") > 100, "the short batch waits for the long one"


async def test_what_was_answered_leaves_the_store_when_its_batch_ends(store):
    new_batch(store, 50)
    before = store.bytes_of("acme")
    worker = BatchWorker(store, lambda: NOW_S)
    worker.begin(good)
    state = await ended(store)

    assert state["request_counts"] == {"total": 50, "completed": 50, "failed": 0}
    assert store.items("batch") == []
    output = len(store.files.content(state["output_file_id"]))
    assert before < store.bytes_of("acme") == output + len(json.dumps(state))


async def test_a_fault_when_a_batch_ends_is_logged_and_tried_again(store, monkeypatch, caplog):
    new_batch(store, 3)
    end, faults = store.end_batch, [ZeroDivisionError()]

    def broken(*args):
        if faults:
            raise faults.pop()
        end(*args)

    monkeypatch.setattr(store, "end_batch", broken)
    worker = BatchWorker(store, lambda: NOW_S, retry_s=0.001)
    worker.begin(good)

    assert (await ended(store))["status"] == "completed"
    assert "tried again" in caplog.text

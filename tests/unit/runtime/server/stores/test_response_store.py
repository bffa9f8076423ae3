from __future__ import annotations

import gc
import sys

from sylvan.runtime.server.stores.responses import ResponseStore
from sylvan.utils.clock import VirtualClock


def names(store: ResponseStore, tenant: str) -> set[str]:
    return {name for name in map(str, range(50)) if store.get(name, tenant) is not None}


def test_ids_are_unique_within_a_tenant_only() -> None:
    store = ResponseStore(10, 1 << 20)
    store.put("acme", {"id": "0", "of": "acme"}, [])

    theirs = store.put("bravo", {"id": "0", "of": "bravo"}, [])
    assert store.get("0", "acme").reply["of"] == "acme"
    store.drop(theirs)

    assert store.get("0", "bravo") is None
    assert store.get("0", "acme") is not None
    assert store.get("0", "") is None


def test_the_oldest_of_the_largest_tenant_goes_first() -> None:
    store = ResponseStore(10, 1 << 20)
    for i in range(3):
        store.put("small", {"id": str(i)}, [])
    for i in range(20):
        store.put("large", {"id": str(i), "text": "x" * 1000}, [])

    assert names(store, "small") == {"0", "1", "2"}
    assert names(store, "large") == {str(i) for i in range(13, 20)}
    store.put("large", {"id": "40", "text": "x" * (2 << 20)}, [])
    assert names(store, "large") == set()
    assert names(store, "small") == {"0", "1", "2"}


def test_a_reply_that_grows_counts_with_its_size() -> None:
    store = ResponseStore(10, 10_000)
    first = store.put("a", {"id": "0"}, [])
    second = store.put("a", {"id": "1"}, [])

    store.change(second, {"output": "x" * 5000})
    assert second.reply == {"id": "1", "output": "x" * 5000}
    assert store.get("0", "a") is first
    store.change(second, {"output": "x" * 9990})

    assert store.get("0", "a") is None


def test_what_is_kept_takes_the_memory_that_is_counted() -> None:
    store = ResponseStore(100, 1 << 20)

    stored = store.put("a", {"id": "0"}, [{"content": [{}] * 200_000}])

    found = gc.get_referents(stored)
    assert {type(part) for part in found} <= {bytes, str, float, type(None), type}
    assert sum(map(sys.getsizeof, found)) < stored.num_bytes + 4096


def test_nothing_is_kept_where_nothing_is_to_be() -> None:
    store = ResponseStore(0, 1 << 20)
    store.put("a", {"id": "0"}, [])

    assert not store.enabled
    assert store.get("0", "a") is None


def test_what_is_old_is_forgotten() -> None:
    clock = VirtualClock()
    store = ResponseStore(10, 1 << 20, 60.0, clock)
    store.put("a", {"id": "0"}, [])
    clock.advance(59)
    store.put("a", {"id": "1"}, [])
    assert names(store, "a") == {"0", "1"}
    clock.advance(1)

    assert names(store, "a") == {"1"}
    clock.advance(59)
    assert store.num_bytes > 0
    store.put("b", {"id": "2"}, [])
    assert names(store, "a") == set()

from __future__ import annotations

from array import array

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sylvan.gateway.prefixes.blocks import BlockIndex
from sylvan.gateway.prefixes.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    read_batch,
)
from sylvan.runtime.cache.types import CacheKey
from sylvan.runtime.features.kv_events.blocks import BlockStored as Published
from sylvan.runtime.features.kv_events.blocks import chain


def ids(*tokens):
    return array("i", tokens).tobytes()


@pytest.fixture
def index():
    made = BlockIndex(1 << 20)
    for worker in ("a", "b"):
        made.begin(worker)
    return made


def test_whole_blocks_match_from_the_start(index):
    index.apply("a", BlockStored([1, 2], [5, 6, 7, 8], 2), plain=False)
    index.apply("b", BlockStored([9], [5, 6], 2), plain=False)

    assert index.matched(ids(5, 6, 7, 8, 9)) == {"a": 4, "b": 2}
    assert index.matched(ids(5, 6, 7, 0)) == {"a": 2, "b": 2}
    assert index.matched(ids(5)) == {"a": 0, "b": 0}
    assert index.matched(b"") == {"a": 0, "b": 0}


def test_blocks_continue_those_that_their_parent_names(index):
    index.apply("a", BlockStored([1], [5, 6], 2), plain=False)
    index.apply("a", BlockStored([2], [7, 8], 2, parent_block_hash=1), plain=False)
    index.apply("a", BlockStored([4], [7, 8], 2, parent_block_hash=3), plain=False)

    assert index.matched(ids(5, 6, 7, 8))["a"] == 4
    assert index.num_blocks == 2  # the predecessor of the last one is unknown


def test_a_hole_ends_the_match(index):
    index.apply("a", BlockStored([1, 2, 3], [1, 2, 3], 1), plain=False)
    index.apply("a", BlockRemoved([2]), plain=False)
    assert index.matched(ids(1, 2, 3))["a"] == 1

    index.apply("a", BlockStored([2], [2], 1, parent_block_hash=1), plain=False)
    assert index.matched(ids(1, 2, 3))["a"] == 3


def test_a_block_is_held_while_it_lies_anywhere(index):
    for medium in ("GPU", "CPU"):
        index.apply("a", BlockStored([1], [1, 2], 2, medium=medium), plain=False)
    index.apply("a", BlockRemoved([1], "GPU"), plain=False)
    assert index.matched(ids(1, 2))["a"] == 2

    index.apply("a", BlockRemoved([1], "CPU"), plain=False)
    assert index.matched(ids(1, 2)) == {"a": 0}
    assert index.num_blocks == index.num_bytes == 0


def test_what_is_promised_counts_until_the_request_is_over(index):
    assert index.promise("a", ids(1, 2)) is None  # it has not said how large its blocks are
    index.apply("a", BlockStored([1], [8, 9], 2), plain=False)
    first, second = index.promise("a", ids(1, 2, 3, 4, 5)), index.promise("a", ids(1, 2))
    assert index.matched(ids(1, 2, 3, 4, 5))["a"] == 4

    first.close()
    first.close()
    assert index.matched(ids(1, 2, 3, 4, 5))["a"] == 2
    second.close()
    assert index.matched(ids(1, 2))["a"] == 0
    index.check()


def test_a_promise_outlives_its_worker(index):
    index.apply("a", BlockStored([1], [8, 9], 2), plain=False)
    promise = index.promise("a", ids(1, 2))
    index.drop("a")
    assert not index.knows("a")
    assert index.matched(ids(1, 2)) == {}
    promise.close()
    index.check()
    assert index.num_blocks == 0


def test_workers_that_are_not_followed_say_nothing(index):
    index.apply("stranger", BlockStored([1], [1], 1), plain=False)
    assert index.matched(ids(1)) == {}


def test_blocks_of_tenants_and_images_differ_from_plain_ones(index):
    tokens = list(range(8))
    for worker, namespace in (("a", ""), ("b", "tenant")):
        hashes = chain(CacheKey(np.array(tokens, np.int32), namespace), 4)
        stored = msgspec.convert(
            msgspec.to_builtins(Published(hashes, tokens, 4)), BlockStored
        )  # as it comes over the wire
        index.apply(worker, stored, plain=True)

    assert index.matched(ids(*tokens)) == {"a": 8, "b": 0}
    assert index.num_blocks == 2


def test_memory_is_bounded(caplog):
    index = BlockIndex(20_000)
    for worker in ("a", "b"):
        index.begin(worker)
    index.apply("b", BlockStored([0], [0], 1), plain=False)
    for number in range(200):
        index.apply("a", BlockStored([number], [number + 1], 1), plain=False)

    assert index.num_bytes <= 20_000
    assert index.matched(ids(0)) == {"b": 1}  # "a" is given up
    assert "too much memory" in caplog.text


@pytest.mark.parametrize(
    "event",
    [
        BlockStored([1, 2], [1], 1),
        BlockStored([1], [1], 0),
        BlockStored([1], [2**40], 1),
    ],
)
def test_events_that_make_no_sense_change_nothing(index, event):
    index.apply("a", event, plain=False)
    index.check()
    assert index.num_blocks == 0


def test_events_of_other_publishers_are_read():
    rows = [
        ["BlockStored", [b"h"], None, [1, 2], 2, None, "GPU"],
        ["BlockStored", [5], 4, [1, 2], 2],
        ["BlockStored", [6], None, [1, 2], 2, 7],  # of an adapter
        ["BlockRemoved", [b"h"], "GPU"],
        ["AllBlocksCleared"],
    ]
    batch = read_batch(msgspec.msgpack.encode([1.5, rows, 0]))

    assert batch.stamp_s == 1.5
    assert batch.events == [
        BlockStored([b"h"], [1, 2], 2, None, "GPU"),
        BlockStored([5], [1, 2], 2, 4),
        BlockRemoved([b"h"], "GPU"),
        AllBlocksCleared(),
    ]


def test_blocks_of_an_adapter_are_left_out():
    plain = Published([1], [1, 2], 2)
    own = Published([2], [1, 2], 2, lora_id="legal@0123456789abcdef", lora_name="legal")

    batch = read_batch(msgspec.msgpack.encode([1.5, [own, plain], 0]))

    assert batch.events == [BlockStored([1], [1, 2], 2)]


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x90", b"\x93\x01\x91\x91\xa1x\xc0", b"\x01"])
def test_garbage_is_refused(payload):
    with pytest.raises(ValueError, match="event"):
        read_batch(payload)


class AgainstSets(RuleBasedStateMachine):
    """The index against sets of prefixes."""

    def __init__(self):
        super().__init__()
        self.index = BlockIndex(1 << 30)
        self.held = {"a": set(), "b": set()}
        self.promised = []
        for worker in self.held:
            self.index.begin(worker)
            self.index.apply(worker, BlockStored([-1], [99], 1), plain=False)
            self.held[worker].add((99,))

    prompts = st.lists(st.integers(0, 2), min_size=1, max_size=5)
    workers = st.sampled_from(["a", "b"])

    @rule(worker=workers, prompt=prompts, start=st.integers(0, 4))
    def store(self, worker, prompt, start):
        start = min(start, len(prompt) - 1)
        if start and tuple(prompt[:start]) not in self.held[worker]:
            return
        prefixes = [tuple(prompt[: i + 1]) for i in range(start, len(prompt))]
        names = [hash(p) for p in prefixes]
        parent = hash(tuple(prompt[:start])) if start else None
        self.index.apply(worker, BlockStored(names, prompt[start:], 1, parent), plain=False)
        self.held[worker].update(prefixes)

    @rule(worker=workers, prompt=prompts)
    def remove(self, worker, prompt):
        self.index.apply(worker, BlockRemoved([hash(tuple(prompt))]), plain=False)
        self.held[worker].discard(tuple(prompt))

    @rule(worker=workers, prompt=prompts)
    def promise(self, worker, prompt):
        self.promised.append((worker, prompt, self.index.promise(worker, ids(*prompt))))

    @rule(data=st.data())
    def keep(self, data):
        if self.promised:
            at = data.draw(st.integers(0, len(self.promised) - 1))
            self.promised.pop(at)[2].close()

    @rule(worker=workers)
    def clear(self, worker):
        self.index.apply(worker, AllBlocksCleared(), plain=False)
        self.held[worker].clear()

    @rule(prompt=prompts)
    def match(self, prompt):
        for worker, count in self.index.matched(ids(*prompt)).items():
            promised = [p for w, p, _ in self.promised if w == worker]
            expected = 0
            while expected < len(prompt):
                prefix = prompt[: expected + 1]
                if tuple(prefix) not in self.held[worker] and not any(
                    p[: len(prefix)] == prefix for p in promised
                ):
                    break
                expected += 1
            assert count == expected

    @invariant()
    def sound(self):
        self.index.check()


AgainstSets.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAgainstSets = AgainstSets.TestCase

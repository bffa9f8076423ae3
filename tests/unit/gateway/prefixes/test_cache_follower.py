"""Followers of cache events, with the publisher that servers have."""

from __future__ import annotations

import asyncio
from array import array
from contextlib import contextmanager

import msgspec
import pytest
import zmq

from sylvan.config.tree import KVEventsConfig
from sylvan.gateway.prefixes.blocks import BlockIndex
from sylvan.gateway.prefixes.cache_follower import CacheFollower
from sylvan.gateway.workers.events import EventSource, event_source, reachable
from sylvan.runtime.features.kv_events.blocks import AllBlocksCleared, BlockStored
from sylvan.runtime.features.kv_events.publisher import KVEventPublisher
from sylvan.utils.clock import VirtualClock
from tests.support.cluster import until
from tests.support.gateway import make_worker


@contextmanager
def publisher(endpoint="tcp://127.0.0.1:*", replay="tcp://127.0.0.1:*", **changes):
    made = KVEventPublisher(KVEventsConfig(endpoint=endpoint, replay_endpoint=replay, **changes))
    try:
        yield made
    finally:
        made.close()


def publish(made, *events):
    made.publish(lambda: list(events))


def stored(*tokens, parent=None):
    return BlockStored([hash((parent, tokens))], list(tokens), len(tokens), parent)


def worker_of(made):
    worker = make_worker(0, VirtualClock())
    worker.found.settings = {
        "kv_events_config": {"endpoint": made.endpoint, "replay_endpoint": made.replay_endpoint}
    }
    worker.spec = type(worker.spec)(url="http://127.0.0.1:80")
    return worker


@pytest.fixture
async def followed():
    index = BlockIndex(1 << 20)
    following = CacheFollower(index)
    yield index, following
    await following.close()


def held(index, worker, *tokens):
    return index.matched(array("i", tokens).tobytes()).get(worker.id)


async def test_what_was_published_before_is_replayed_and_the_rest_follows(followed):
    index, following = followed
    with publisher() as made:
        worker = worker_of(made)
        publish(made, stored(1, 2))
        following.follow(worker)
        await until(lambda: held(index, worker, 1, 2) == 2)
        publish(made, stored(3, 4))
        await until(lambda: held(index, worker, 3, 4) == 2)
        publish(made, AllBlocksCleared())
        await until(lambda: held(index, worker, 1, 2) == 0)


async def test_a_cache_whose_begin_is_lost_is_known_once_it_is_empty(followed):
    index, following = followed
    with publisher(buffer_steps=1) as made:
        worker = worker_of(made)
        for token in range(5):
            publish(made, stored(token, token))
        following.follow(worker)
        publish(made, stored(8, 8))
        publish(made, AllBlocksCleared(), stored(9, 9))
        await until(lambda: held(index, worker, 9, 9) == 2)
        assert held(index, worker, 8, 8) == 0


async def test_without_replays_a_server_is_known_from_its_first_message(followed):
    index, following = followed
    with publisher(replay=None) as made:
        worker = worker_of(made)
        following.follow(worker)
        for number in range(500):  # until it has subscribed, messages are lost
            publish(made, AllBlocksCleared(), stored(number, number))
            if index.knows(worker.id):
                break
            await until_soon()
        assert index.knows(worker.id)


async def until_soon():
    await asyncio.sleep(0.02)


async def test_a_server_that_restarts_holds_nothing(followed):
    index, following = followed
    with publisher() as made:
        worker = worker_of(made)
        endpoints = {"endpoint": made.endpoint, "replay": made.replay_endpoint}
        publish(made, stored(1, 2))
        publish(made, stored(3, 4))
        following.follow(worker)
        await until(lambda: held(index, worker, 3, 4) == 2)
    with publisher(**endpoints) as again:
        for _ in range(500):
            publish(again, stored(5, 6))
            await until_soon()
            if held(index, worker, 5, 6) == 2:
                break
        assert held(index, worker, 1, 2) == 0
        assert held(index, worker, 5, 6) == 2


async def test_a_worker_that_was_lost_is_asked_again(followed):
    index, following = followed
    with publisher() as made:
        worker = worker_of(made)
        publish(made, stored(1, 2))
        following.follow(worker)
        await until(lambda: held(index, worker, 1, 2) == 2)
        following.lost(worker)
        assert held(index, worker, 1, 2) is None
        await until(lambda: held(index, worker, 1, 2) == 2)
        following.leave(worker)
        assert held(index, worker, 1, 2) is None


async def test_messages_that_are_none_are_passed_over(followed):
    index, following = followed
    with zmq.Context() as context, context.socket(zmq.PUB) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        worker = make_worker(0, VirtualClock())
        worker.found.settings = {"kv_events_config": {"endpoint": f"tcp://127.0.0.1:{port}"}}
        worker.spec = type(worker.spec)(url="http://127.0.0.1:80")
        following.follow(worker)
        event = {
            "type": "BlockStored",
            "block_hashes": [1],
            "token_ids": [7],
            "block_size": 1,
        }
        good = msgspec.msgpack.encode([1.5, [event], 0])
        for _ in range(500):
            for frames in ((b"x",), (b"", b"short", good), (b"", bytes(8), b"\xc1")):
                socket.send_multipart(frames)
            socket.send_multipart((b"", bytes(8), good))
            await until_soon()
            if held(index, worker, 7) == 1:
                break
        assert held(index, worker, 7) == 1


@pytest.mark.parametrize(
    ("address", "url", "expected"),
    [
        ("tcp://127.0.0.1:5557", "http://127.0.0.1:80", "tcp://127.0.0.1:5558"),
        ("tcp://127.0.0.1:5557", "http://10.0.0.7:80", None),
        ("tcp://*:5557", "http://10.0.0.7:80", "tcp://10.0.0.7:5558"),
        ("tcp://0.0.0.0:5557", "http://[fe80::1]:80", "tcp://[fe80::1]:5558"),
        ("tcp://kv.example:5557", "http://10.0.0.7:80", "tcp://kv.example:5558"),
        ("tcp://*:65535", "http://10.0.0.7:80", None),
        ("ipc:///tmp/x", "http://127.0.0.1:80", None),
        (None, "http://127.0.0.1:80", None),
        (7, "http://127.0.0.1:80", None),
    ],
)
def test_addresses_are_those_that_others_reach(address, url, expected):
    assert reachable(address, url, 1) == expected


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ({}, None),
        ({"kv_events": {"endpoint": "tcp://*:1"}}, EventSource("tcp://h:1", is_plain=True)),
        (
            {"kv_events_config": '{"publisher": "zmq", "endpoint": "tcp://*:1", "topic": "t"}'},
            EventSource("tcp://h:1", topic="t"),
        ),
        ({"kv_events_config": '{"publisher": "null"}'}, None),
        ({"kv_events_config": "garbage"}, None),
        ({"kv_events": {"endpoint": "tcp://*:1", "topic": 3}}, None),
        ({"kv_events": [1]}, None),
    ],
)
def test_servers_tell_where_they_publish(info, expected):
    assert event_source(info, "http://h:80") == expected

"""A real subscriber hears what was published, and asks again for what it missed."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
import zmq

from sylvan.config.tree import KVEventsConfig
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.features.kv_events.blocks import BlockRemoved, BlockStored
from sylvan.runtime.features.kv_events.publisher import END_OF_REPLAY, KVEventPublisher

ANYWHERE = "tcp://127.0.0.1:*"
TIMEOUT_MS = 20_000
STORED = BlockStored([11, -12], [1, 2, 3, 4], 2, None, "CPU")


@pytest.fixture
def publisher() -> Iterator[KVEventPublisher]:
    made = KVEventPublisher(
        KVEventsConfig(endpoint=ANYWHERE, replay_endpoint=ANYWHERE, topic="kv", buffer_steps=3)
    )
    yield made
    made.close()


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as made:
        yield made


def connected(context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str | None):
    assert address is not None
    socket = context.socket(kind)
    socket.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(address)
    return socket


def test_a_subscriber_hears_numbered_batches(publisher, context):
    with connected(context, zmq.SUB, publisher.endpoint) as socket:
        socket.subscribe(b"kv")
        socket.setsockopt(zmq.RCVTIMEO, 100)
        heard = []
        while not heard:  # a subscription takes a moment to arrive; what came before is not heard
            publisher.publish(lambda: [STORED])
            try:
                heard = socket.recv_multipart()
            except zmq.Again:
                continue
        socket.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
        publisher.publish(lambda: [BlockRemoved([11], "CPU")])
        number = int.from_bytes(heard[1], "big")
        later = socket.recv_multipart()
        while int.from_bytes(later[1], "big") != publisher._next - 1:
            later = socket.recv_multipart()

    assert heard[0] == b"kv"
    assert number >= 0
    stamp, events, rank = msgspec.msgpack.decode(heard[2])
    assert stamp > 1.7e9
    assert rank == 0
    assert events == [
        {
            "type": "BlockStored",
            "block_hashes": [11, -12],
            "token_ids": [1, 2, 3, 4],
            "block_size": 2,
            "medium": "CPU",
        }
    ]
    assert msgspec.msgpack.decode(later[2])[1] == [
        {"type": "BlockRemoved", "block_hashes": [11], "medium": "CPU"}
    ]


def test_what_was_missed_is_repeated_as_far_as_it_is_kept(publisher, context):
    for number in range(5):
        publisher.publish(lambda number=number: [BlockRemoved([number])])

    with connected(context, zmq.DEALER, publisher.replay_endpoint) as socket:
        numbers: list[int] = []
        while 4 not in numbers:  # the publisher's thread may still be at work on the batches
            socket.send_multipart((b"", (0).to_bytes(8, "big")))
            answer = socket.recv_multipart()
            while answer[2] != END_OF_REPLAY:
                numbers.append(int.from_bytes(answer[2], "big"))
                assert msgspec.msgpack.decode(answer[3])[1][0]["block_hashes"] == [numbers[-1]]
                answer = socket.recv_multipart()

    assert numbers[-3:] == [2, 3, 4]


def test_nonsense_from_a_subscriber_changes_nothing(publisher, context):
    publisher.publish(lambda: [STORED])
    with connected(context, zmq.DEALER, publisher.replay_endpoint) as socket:
        socket.send(b"what?")
        socket.send_multipart((b"", b"short"))
        socket.send_multipart((b"", (9).to_bytes(8, "big")))
        assert socket.recv_multipart()[2] == END_OF_REPLAY


def test_an_address_in_use_is_named(publisher):
    with pytest.raises(ConfigError, match=r"kv_events\.endpoint=tcp://127.*cannot listen"):
        KVEventPublisher(KVEventsConfig(endpoint=publisher.endpoint))

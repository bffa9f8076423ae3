"""Cache events over gRPC: a real publisher, a real server, a real client."""

from __future__ import annotations

import asyncio
import hashlib
import json
from contextlib import asynccontextmanager

import grpc
import pytest

from sylvan.config.tree import KVEventsConfig
from sylvan.config.values import Secret
from sylvan.rpc import common_pb2 as common
from sylvan.runtime.features.kv_events.blocks import AllBlocksCleared, BlockRemoved, BlockStored
from sylvan.runtime.features.kv_events.publisher import KVEventPublisher
from sylvan.runtime.server.grpc.server import SERVICE
from tests.support.grpc_client import grpc_served
from tests.support.scripted import write_checkpoint

ANYWHERE = "tcp://127.0.0.1:*"
FIRST = BlockStored([11, -12], [1, 2, 3, 4], 2, None, "GPU")
NEXT = BlockStored([13], [5, 6], 2, -12, "GPU")
GONE = BlockRemoved([13], "GPU")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("scripted"))


@pytest.fixture
def publisher():
    settings = KVEventsConfig(
        endpoint=ANYWHERE, replay_endpoint=ANYWHERE, topic="kv", buffer_steps=3
    )
    made = KVEventPublisher(settings)
    yield made
    made.close()


def told(publisher, *, replay=True):
    """The server's settings of its publisher."""
    replay_endpoint = publisher.replay_endpoint if replay else None
    known = {"endpoint": publisher.endpoint, "replay_endpoint": replay_endpoint, "topic": "kv"}
    return {"kv_events": known}


@asynccontextmanager
async def subscribed(server, start=0, metadata=(), **fields):
    """A subscription as it comes."""
    call = server.channel.unary_stream(
        f"/{SERVICE}/SubscribeKvEvents", response_deserializer=common.KvEventBatch.FromString
    )
    asked = common.SubscribeKvEventsRequest(start_sequence_number=start, **fields)
    stream = call(asked.SerializeToString(), metadata=metadata)
    try:
        async with asyncio.timeout(30):
            yield stream
    finally:
        stream.cancel()


async def test_batches_are_replayed_and_then_followed(folder, publisher):
    for event in (FIRST, NEXT):
        publisher.publish(lambda event=event: [event])
    async with grpc_served(folder, shown=told(publisher)) as server, subscribed(server) as stream:
        first, second = await stream.read(), await stream.read()
        publisher.publish(lambda: [GONE, AllBlocksCleared()])
        third = await stream.read()
    assert [b.sequence_number for b in (first, second, third)] == [0, 1, 2]
    assert first.timestamp <= third.timestamp
    stored = first.events[0].stored
    assert [b.block_hash for b in stored.blocks] == [11, -12]
    assert [list(b.token_ids) for b in stored.blocks] == [[1, 2], [3, 4]]
    assert {b.block_size for b in stored.blocks} == {2}
    assert not stored.HasField("parent_block_hash")
    assert (stored.tier, stored.medium) == (common.KV_CACHE_TIER_DEVICE, "GPU")
    assert second.events[0].stored.parent_block_hash == -12
    assert list(third.events[0].removed.block_hashes) == [13]
    assert third.events[1].WhichOneof("data") == "cleared"


async def test_a_client_continues_where_it_was(folder, publisher):
    for _ in range(5):
        publisher.publish(lambda: [FIRST])
    async with grpc_served(folder, shown=told(publisher)) as server:
        async with subscribed(server, start=3) as stream:
            numbers = [(await stream.read()).sequence_number for _ in range(2)]
        assert numbers == [3, 4]
        async with subscribed(server) as stream:  # three are kept, and the gap shows
            assert (await stream.read()).sequence_number == 2


async def test_many_batches_come_in_order_and_once(folder, publisher):
    async with grpc_served(folder, shown=told(publisher)) as server, subscribed(server) as stream:
        publisher.publish(lambda: [FIRST])
        assert (await stream.read()).sequence_number == 0
        for _ in range(500):
            publisher.publish(lambda: [GONE])
        numbers = [(await stream.read()).sequence_number for _ in range(500)]
    assert numbers == list(range(1, 501))


async def test_a_publisher_that_restarts_is_followed(folder):
    settings = KVEventsConfig(endpoint=ANYWHERE, replay_endpoint=ANYWHERE)
    first = KVEventPublisher(settings)
    known = {"endpoint": first.endpoint, "replay_endpoint": first.replay_endpoint}
    for _ in range(3):
        first.publish(lambda: [FIRST])
    async with (
        grpc_served(folder, shown={"kv_events": known}) as server,
        subscribed(server) as stream,
    ):
        assert [(await stream.read()).sequence_number for _ in range(3)] == [0, 1, 2]
        first.close()
        again = KVEventPublisher(KVEventsConfig(**known))
        try:
            reading = asyncio.ensure_future(stream.read())
            while not reading.done():  # until the subscription has come to the new one
                again.publish(lambda: [GONE])
                await asyncio.sleep(0.02)
            batch = await reading
        finally:
            again.close()
    assert batch.events[0].WhichOneof("data") == "removed"


async def test_the_load_comes_first_if_it_is_asked_for(folder, publisher):
    publisher.publish(lambda: [FIRST])
    async with (
        grpc_served(folder, shown=told(publisher)) as server,
        subscribed(server, load_records_before_first_batch=True) as stream,
    ):
        load, batch = await stream.read(), await stream.read()
    assert load.load.load_only
    assert load.load.max_running_requests > 0
    assert not load.events
    assert len(batch.events) == 1


async def refused(stream):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stream.read()
    return caught.value


async def test_a_server_without_events_says_so(folder):
    async with grpc_served(folder) as server, subscribed(server) as stream:
        error = await refused(stream)
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "--kv-events.endpoint" in error.details()


async def test_tenants_do_not_learn_what_others_ask(folder, publisher, tmp_path):
    publisher.publish(lambda: [FIRST])
    keys = tmp_path / "keys.json"
    tenant = {"sha256": hashlib.sha256(b"t").hexdigest(), "tenant": "t"}
    keys.write_text(json.dumps({"keys": [tenant]}))
    settings = {"api_key": Secret("k"), "api_key_file": str(keys), "shown": told(publisher)}
    async with grpc_served(folder, **settings) as server:
        for key, allowed in (("k", True), ("t", False), ("x", False)):
            metadata = [("authorization", f"Bearer {key}")]
            async with subscribed(server, metadata=metadata) as stream:
                if allowed:
                    assert (await stream.read()).sequence_number == 0
                else:
                    code = (await refused(stream)).code()
                    expected = "PERMISSION_DENIED" if key == "t" else "UNAUTHENTICATED"
                    assert code.name == expected

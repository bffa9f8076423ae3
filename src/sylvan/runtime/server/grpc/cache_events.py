"""Streams cache events over gRPC, read from this server's publisher."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from sylvan.protocol.errors import CapacityError, RequestError
from sylvan.rpc import common_pb2 as common
from sylvan.rpc import scheduler_pb2 as pb
from sylvan.runtime.server.context import Context
from sylvan.runtime.server.grpc import info_methods

HIGH_WATER = 100_000
"""Messages queued for a slow client; further ones are dropped, which shows as a gap in numbers."""
CONNECT_S = 10.0
"""Seconds to wait for the publisher to start."""
_ANYWHERE = ("tcp://*:", "tcp://0.0.0.0:", "tcp://[::]:")
_TIER = common.KV_CACHE_TIER_DEVICE  # tiers below device memory are not reported


class _Batch(msgspec.Struct, array_like=True):
    stamp_s: float
    events: list[dict[str, Any]]
    rank: int = 0


_DECODER = msgspec.msgpack.Decoder(_Batch)


async def cache_events(
    context: Context, start: int, *, with_load: bool
) -> AsyncGenerator[common.KvEventBatch, None]:
    """Yield batches from number `start` on, as far as they are kept, then new ones.

    Args:
        context: The dependencies.
        start: Number of the first batch.
        with_load: Start with the load of the scheduler.

    Raises:
        RequestError: The server does not publish events.
        CapacityError: The publisher is not running.
    """
    settings: Mapping[str, Any] | None = context.settings.shown.get("kv_events")
    if not settings:
        text = "Cache events are off: start the server with --kv-events.endpoint"
        raise RequestError(text, status=501)
    if with_load:
        yield _load(context, start)
    zmq_context = zmq.asyncio.Context()
    live: Any = zmq_context.socket(zmq.SUB)
    try:
        live.setsockopt(zmq.RCVHWM, HIGH_WATER)
        await _connect(live, _loopback_address(settings["endpoint"]), settings.get("topic") or "")
        replay = settings.get("replay_endpoint")
        after, stamp_s = start, 0.0  # next number, and time of the last batch
        batch = common.KvEventBatch(sequence_number=start + 1)  # as if `start` had been missed
        while True:
            if replay and batch.sequence_number > after:
                async with aclosing(_kept(zmq_context, _loopback_address(replay), after)) as kept:
                    async for found in kept:
                        after, stamp_s = found.sequence_number + 1, found.timestamp
                        yield found
            # a newer batch with a smaller number comes from a restarted scheduler
            if batch.timestamp and (batch.sequence_number >= after or batch.timestamp > stamp_s):
                after, stamp_s = batch.sequence_number + 1, batch.timestamp
                yield batch
            frames: Sequence[bytes] = await live.recv_multipart()
            batch = _batch(frames[1], frames[2])
    finally:
        zmq_context.destroy(linger=0)


async def _connect(socket: Any, address: str, topic: str) -> None:
    connected = socket.get_monitor_socket(zmq.EVENT_CONNECTED)
    try:
        socket.connect(address)
        socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
        async with asyncio.timeout(CONNECT_S):
            await connected.recv_multipart()
    except TimeoutError:
        raise CapacityError("The publisher of cache events is not running.") from None
    finally:
        socket.disable_monitor()
        connected.close(linger=0)


async def _kept(
    context: zmq.asyncio.Context, address: str, first: int
) -> AsyncGenerator[common.KvEventBatch, None]:
    """Return the batches that the publisher has kept."""
    socket: Any = context.socket(zmq.DEALER)
    try:
        socket.connect(address)
        await socket.send_multipart((b"", first.to_bytes(8, "big")))
        while True:
            async with asyncio.timeout(CONNECT_S):
                frames: Sequence[bytes] = await socket.recv_multipart()
            if not frames[3]:
                return
            yield _batch(frames[2], frames[3])
    except TimeoutError:
        raise CapacityError("The publisher of cache events does not answer.") from None
    finally:
        socket.close(linger=0)


def _loopback_address(address: str) -> str:
    """Return a loopback address for a socket that listens on all interfaces."""
    for anywhere in _ANYWHERE:
        if address.startswith(anywhere):
            return "tcp://127.0.0.1:" + address.removeprefix(anywhere)
    return address


def _batch(number: bytes, payload: bytes) -> common.KvEventBatch:
    batch = _DECODER.decode(payload)
    return common.KvEventBatch(
        sequence_number=int.from_bytes(number, "big"),
        timestamp=batch.stamp_s,
        events=[_event(i, event) for i, event in enumerate(batch.events)],
        dp_rank=batch.rank,
    )


def _event(number: int, event: Mapping[str, Any]) -> common.KvCacheEvent:
    made = common.KvCacheEvent(event_id=number)
    medium = event.get("medium")
    match event["type"]:
        case "BlockStored":
            size, ids = event["block_size"], event["token_ids"]
            made.stored.CopyFrom(
                common.KvBlocksStored(
                    blocks=[
                        common.KvBlock(
                            block_hash=name,
                            token_ids=ids[i * size : (i + 1) * size],
                            block_size=size,
                        )
                        for i, name in enumerate(event["block_hashes"])
                    ],
                    parent_block_hash=event.get("parent_block_hash"),
                    tier=_TIER,
                    medium=medium,
                )
            )
        case "BlockRemoved":
            made.removed.CopyFrom(
                common.KvBlocksRemoved(
                    block_hashes=event["block_hashes"], tier=_TIER, medium=medium
                )
            )
        case _:
            made.cleared.CopyFrom(common.KvCacheCleared())
    return made


def _load(context: Context, start: int) -> common.KvEventBatch:
    row = info_methods.loads(context, pb.GetLoadsRequest()).loads[0]
    return common.KvEventBatch(
        sequence_number=start,
        timestamp=context.wall(),
        dp_rank=row.dp_rank,
        load=common.EngineLoad(
            running_requests=row.num_running_reqs,
            waiting_requests=row.num_waiting_reqs,
            waiting_uncached_tokens=row.num_waiting_uncached_tokens,
            token_usage=row.token_usage,
            gen_throughput=row.gen_throughput,
            max_running_requests=row.max_running_requests,
            load_only=True,
            cache_hit_rate=row.cache_hit_rate,
            num_used_tokens=row.num_used_tokens,
            max_total_num_tokens=row.max_total_num_tokens,
        ),
    )

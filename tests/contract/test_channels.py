"""Every implementation of a channel keeps the same promises."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from sylvan.protocol.messages import Abort, StopFound, Submit, ToScheduler
from sylvan.protocol.requests import GenerateRequest
from sylvan.protocol.sampling import SamplingParams
from sylvan.transport.api import AsyncDuplex, AsyncReceiver, Duplex, MessageReceiver, MessageSender
from sylvan.transport.arrays import SharedArrays
from sylvan.transport.codec import MessageDecoder, MessageEncoder
from sylvan.transport.inproc import AsyncPipe, Pipe
from sylvan.transport.zmq import AsyncPullReceiver, AsyncPushSender, PullReceiver, PushSender

PATIENCE_S = 20.0
Pair = tuple[MessageSender[Any], MessageReceiver[Any]]
AsyncPair = tuple[MessageSender[Any], AsyncReceiver[Any]]


@contextmanager
def _inproc(_: Path) -> Iterator[Pair]:
    pipe: Pipe[Any] = Pipe()
    yield pipe, pipe
    pipe.close()


@contextmanager
def _zmq(path: Path) -> Iterator[Pair]:
    context: Any = zmq.Context()
    store, address = SharedArrays(path), f"ipc://{path / 's'}"
    sender: PushSender[Any] = PushSender(context, address, MessageEncoder(store))
    receiver: PullReceiver[Any] = PullReceiver(
        context, [address], MessageDecoder(ToScheduler, store)
    )
    yield sender, receiver
    sender.close()
    receiver.close()
    context.destroy(linger=0)


@asynccontextmanager
async def _async_inproc(_: Path) -> AsyncIterator[AsyncPair]:
    pipe: AsyncPipe[Any] = AsyncPipe(asyncio.get_running_loop())
    yield pipe, pipe
    pipe.close()


@asynccontextmanager
async def _async_zmq(path: Path) -> AsyncIterator[AsyncPair]:
    context: Any = zmq.Context()
    store, address = SharedArrays(path), f"ipc://{path / 's'}"
    sender: AsyncPushSender[Any] = AsyncPushSender(context, address, MessageEncoder(store))
    decoder: MessageDecoder[Any] = MessageDecoder(ToScheduler, store)
    receiver: AsyncPullReceiver[Any] = AsyncPullReceiver(context, [address], decoder)
    yield sender, receiver
    sender.close()
    receiver.close()
    context.destroy(linger=0)


BLOCKING = pytest.mark.parametrize("make", [_inproc, _zmq])
ASYNC = pytest.mark.parametrize("make", [_async_inproc, _async_zmq])


def request(num_tokens: int = 5) -> Submit:
    return Submit(
        request=GenerateRequest(
            rid="r.0#1.1",
            input_ids=np.arange(num_tokens, dtype=np.int32),
            output_ids=np.empty(0, np.int32),
            sampling=SamplingParams(sampling_seed=-(2**63), stop=("\u00e4",)),
        )
    )


@BLOCKING
def test_messages_arrive_whole_and_in_order(make: Callable[..., Any], tmp_path: Path) -> None:
    sent = [StopFound(rid=str(i), num_tokens=i, matched=None) for i in range(500)]
    with make(tmp_path) as (sender, receiver):
        for message in sent:
            sender.send(message)
        assert [receiver.receive(PATIENCE_S) for _ in sent] == sent
        assert receiver.receive() is None


@BLOCKING
@pytest.mark.parametrize("num_tokens", [0, 3, 16_384, 16_385, 400_000])
def test_arrays_of_any_size_arrive_equal(
    make: Callable[..., Any], tmp_path: Path, num_tokens: int
) -> None:
    with make(tmp_path) as (sender, receiver):
        sender.send(request(num_tokens))
        got = receiver.receive(PATIENCE_S)

    assert isinstance(got.request.input_ids, np.ndarray)
    assert got.request.input_ids.dtype == np.int32
    assert np.array_equal(got.request.input_ids, np.arange(num_tokens))
    assert got.request.sampling == request().request.sampling
    assert not list(tmp_path.glob("a*"))


@BLOCKING
def test_receive_gives_up_after_the_timeout(make: Callable[..., Any], tmp_path: Path) -> None:
    with make(tmp_path) as (_, receiver):
        assert receiver.receive(0.01) is None


@BLOCKING
def test_a_waiting_receiver_is_woken(make: Callable[..., Any], tmp_path: Path) -> None:
    with make(tmp_path) as (sender, receiver):
        got: list[Any] = []
        waiting = threading.Thread(target=lambda: got.append(receiver.receive(PATIENCE_S)))
        waiting.start()
        sender.send(Abort(rid="x"))
        waiting.join(PATIENCE_S)

    assert got == [Abort(rid="x")]


@BLOCKING
def test_close_is_idempotent(make: Callable[..., Any], tmp_path: Path) -> None:
    with make(tmp_path) as (sender, receiver):
        duplex = Duplex(sender, receiver)
        duplex.close()
        duplex.close()


@ASYNC
async def test_async_messages_arrive_in_order(make: Callable[..., Any], tmp_path: Path) -> None:
    sent = [StopFound(rid=str(i), num_tokens=i, matched="m") for i in range(500)]
    async with make(tmp_path) as (sender, receiver), asyncio.timeout(PATIENCE_S):
        channel: AsyncDuplex[Any, Any] = AsyncDuplex(sender, receiver)
        for message in sent:
            channel.send(message)
        assert [await channel.receive() for _ in sent] == sent


@ASYNC
async def test_async_receivers_are_woken_each_time(
    make: Callable[..., Any], tmp_path: Path
) -> None:
    async with make(tmp_path) as (sender, receiver), asyncio.timeout(PATIENCE_S):
        for i in range(50):
            waiting = asyncio.create_task(receiver.receive())
            await asyncio.sleep(0)
            sender.send(Abort(rid=str(i)))
            assert await waiting == Abort(rid=str(i))


@ASYNC
async def test_a_cancelled_receive_loses_nothing(make: Callable[..., Any], tmp_path: Path) -> None:
    async with make(tmp_path) as (sender, receiver), asyncio.timeout(PATIENCE_S):
        waiting = asyncio.create_task(receiver.receive())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
        sender.send(Abort(rid="x"))
        assert await receiver.receive() == Abort(rid="x")

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import zmq

from sylvan.protocol.messages import Abort, ToScheduler
from sylvan.transport.api import MessageError
from sylvan.transport.codec import MessageDecoder, MessageEncoder
from sylvan.transport.zmq import PullReceiver, PushSender

PATIENCE_S = 20.0


def receiver(context: Any, *addresses: str) -> PullReceiver[Any]:
    return PullReceiver(context, addresses, MessageDecoder(ToScheduler))


def test_malformed_bytes_are_an_error_of_that_message_only(tmp_path: Path) -> None:
    context: Any = zmq.Context()
    address = f"ipc://{tmp_path / 's'}"
    inbox = receiver(context, address)
    sender: PushSender[Any] = PushSender(context, address, MessageEncoder())
    raw = context.socket(zmq.PUSH)
    raw.connect(address)
    raw.send(b"\xc1 not msgpack")

    with pytest.raises(MessageError):
        inbox.receive(PATIENCE_S)
    sender.send(Abort(rid="x"))
    assert inbox.receive(PATIENCE_S) == Abort(rid="x")
    context.destroy(linger=0)


def test_one_receiver_hears_several_addresses(tmp_path: Path) -> None:
    context: Any = zmq.Context()
    addresses = [f"ipc://{tmp_path / name}" for name in "ab"]
    inbox = receiver(context, *addresses)
    senders = [PushSender[Any](context, address, MessageEncoder()) for address in addresses]
    for sender, address in zip(senders, addresses, strict=True):
        sender.send(Abort(rid=address))

    got = {inbox.receive(PATIENCE_S).rid for _ in addresses}

    assert got == set(addresses)
    context.destroy(linger=0)


def test_messages_wait_for_a_receiver_that_comes_back(tmp_path: Path) -> None:
    context: Any = zmq.Context()
    address = f"ipc://{tmp_path / 's'}"
    sender: PushSender[Any] = PushSender(context, address, MessageEncoder())
    first = receiver(context, address)
    sender.send(Abort(rid="1"))
    assert first.receive(PATIENCE_S) == Abort(rid="1")
    first.close()

    second = receiver(context, address)
    got = None
    for i in range(1000):  # those under way when the first went may be lost
        sender.send(Abort(rid=f"2-{i}"))
        if (got := second.receive(0.05)) is not None:
            break

    assert got is not None
    context.destroy(linger=0)


def test_an_address_that_cannot_be_bound_is_a_clear_error(tmp_path: Path) -> None:
    context: Any = zmq.Context()
    with pytest.raises(MessageError, match="cannot listen"):
        receiver(context, f"ipc://{tmp_path}/missing/s")
    context.destroy(linger=0)

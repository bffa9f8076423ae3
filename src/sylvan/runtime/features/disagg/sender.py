"""Prefill side of the transfer: listens, lets decode servers in, and sends pages to them."""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import threading
from collections import OrderedDict
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.core.memory import PageMemory
from sylvan.runtime.features.disagg.channel import Buffer, Channel, ChannelError, Network
from sylvan.runtime.features.disagg.data import (
    Asked,
    Expose,
    Over,
    PrefillEvents,
    PrefillWork,
    SendPages,
    Sent,
    Withdraw,
)
from sylvan.runtime.features.disagg.loop import LoopThread
from sylvan.runtime.features.disagg.messages import (
    NONCE_BYTES,
    PROTOCOL,
    Accepted,
    Ask,
    Denied,
    Done,
    Failed,
    Hello,
    Message,
    Pages,
    Want,
    decode,
    encode,
    proof,
)
from sylvan.runtime.features.disagg.segment import Segment
from sylvan.runtime.storage.manifest import Manifest, decode_manifest

logger = logging.getLogger(__name__)

Value = TypeVar("Value")

HANDSHAKE_S = 10.0
USED_ROOMS = 1 << 16
"""So many rooms that were used are remembered, and refused when they are asked for again."""


@dataclass(slots=True)
class _Part:
    """Pages in host memory; `buffer` is empty where they lie in the segment already."""

    message: Pages
    buffer: Buffer
    num_bytes: int


@dataclass(slots=True, eq=False)
class _Room:
    """One request. `task` sends, once a decode server has come; `withdrawn` says why it stops."""

    job: int
    digest: bytes
    queue: asyncio.Queue[_Part] = field(default_factory=asyncio.Queue["_Part"])
    task: asyncio.Task[Any] | None = None
    withdrawn: str = ""


@dataclass(frozen=True, slots=True)
class _Share:
    """Memory of a decode server, for pages from entry `first` on."""

    segment: Segment
    first: int


class Sender:
    """Carries out `PrefillWork`; `events` tells what has happened since.

    Args:
        network: Makes channels.
        memory: The pages of the model.
        identity: What KV depends on: decode servers must have the same.
        secret: Known to both sides.
        shares: Whether pages may go through shared memory.
        patience_s: How long a decode server may wait for a request that is not here yet.
    """

    def __init__(
        self,
        network: Network,
        memory: PageMemory,
        identity: Manifest,
        secret: bytes,
        *,
        shares: bool = True,
        patience_s: float = 120.0,
    ) -> None:
        self._network, self._memory = network, memory
        self._identity, self._secret = identity, secret
        self._may_share, self._patience_s = shares, patience_s
        self._thread = LoopThread("sylvan-prefill")
        # of the loop's thread:
        self._rooms: dict[int, _Room] = {}
        self._by_job: dict[int, int] = {}
        self._arrivals: dict[int, asyncio.Event] = {}
        self._used: OrderedDict[int, None] = OrderedDict()
        # of both threads:
        self._lock = threading.Lock()
        self._shares: dict[int, _Share] = {}  # by job
        self._events: list[Asked | Sent | Over] = []

    def listen(self, host: str, port: int) -> int:
        """Let decode servers in; returns the port.

        Raises:
            ConfigError: the address cannot be used.
        """
        try:
            return self._thread.wait(self._network.listen(host, port, self._serve))
        except OSError as error:
            raise ConfigError(
                f"disagg.bootstrap_port={port}: {host} cannot be listened on: {error.strerror}"
            ) from None

    def begin(self, work: PrefillWork) -> None:
        """Begin all of it. Pages are copied to host memory before this returns."""
        for item in work:
            match item:
                case Expose():
                    self._thread.call(self._expose, item)
                case SendPages():
                    self._export(item)
                case Withdraw():
                    self._thread.call(self._withdraw, item.job, item.reason)

    def events(self) -> PrefillEvents | None:
        """What has happened since the last call; None: nothing."""
        with self._lock:
            events, self._events = self._events, []
        return tuple(events) or None

    def close(self) -> None:
        """End all connections."""
        self._thread.call(self._network.close)
        self._thread.close()

    # ---- on the thread of the steps

    def _export(self, work: SendPages) -> None:
        size, count = self._memory.page_bytes, len(work.pages)
        with self._lock:
            share = self._shares.get(work.job)
        if share is not None:
            begin = (work.first - share.first) * size
            buffer = share.segment.bytes[begin : begin + count * size]
        else:
            buffer = self._memory.host_buffer(count)
        checksums = b""
        if count:
            numbers = np.array(work.pages, np.int32)
            transfer = self._memory.export(numbers, buffer, checksum=True)
            transfer.wait()
            if transfer.error or transfer.checksums is None:
                reason = f"pages could not be read: {transfer.error}"
                self._thread.call(self._withdraw, work.job, reason)
                return
            checksums = transfer.checksums.astype("<u8").tobytes()
        message = Pages(work.first, count, checksums, work.last, share is not None)
        part = _Part(message, buffer if share is None else buffer[:0], count * size)
        self._thread.call(self._put, work.job, part)

    # ---- in the loop

    def _expose(self, work: Expose) -> None:
        if work.room in self._rooms or work.room in self._used:
            self._tell(Over(work.job, f"bootstrap_room {work.room} was used before"))
            return
        self._rooms[work.room] = _Room(work.job, work.digest)
        self._by_job[work.job] = work.room
        if (arrival := self._arrivals.pop(work.room, None)) is not None:
            arrival.set()

    def _put(self, job: int, part: _Part) -> None:
        if (number := self._by_job.get(job)) is not None:
            self._rooms[number].queue.put_nowait(part)

    def _withdraw(self, job: int, reason: str) -> None:
        number = self._by_job.get(job)
        if number is None:
            return
        room = self._rooms[number]
        room.withdrawn = reason
        if room.task is None:
            self._forget(number, reason)
        else:
            room.task.cancel()

    def _forget(self, number: int, error: str) -> None:
        room = self._rooms.pop(number)
        del self._by_job[room.job]
        self._used[number] = None
        if len(self._used) > USED_ROOMS:
            self._used.popitem(last=False)
        with self._lock:
            share = self._shares.pop(room.job, None)
            self._events.append(Over(room.job, error))
        if share is not None:
            share.segment.close()

    async def _serve(self, channel: Channel) -> None:
        """One connection: let it in, then send."""
        number = None
        error = "the server ends"
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                ask, accepted = await self._let_in(channel)
            number = await self._claim(ask)
            await channel.send(encode(accepted))
            want = _wanted(decode((await channel.receive())[0]))
            error = await self._send(channel, self._rooms[number], want)
        except asyncio.CancelledError:
            withdrawn = number is not None and self._rooms[number].withdrawn
            if not withdrawn:
                raise  # the server ends
            error = withdrawn
            await _farewell(channel, Failed(error))
        except _DeniedError as denied:
            error = str(denied)
            logger.warning("a decode server was refused: %s", denied)
            await _farewell(channel, Denied(error))
        except TimeoutError:
            error = "the handshake took too long"
        except ChannelError as failed:
            error = str(failed)
            if number is None:
                logger.warning("a connection of a decode server failed: %s", failed)
        finally:
            if number is not None:
                self._forget(number, error)

    async def _let_in(self, channel: Channel) -> tuple[Ask, Accepted]:
        hello = Hello(PROTOCOL, secrets.token_bytes(NONCE_BYTES))
        await channel.send(encode(hello))
        ask = decode((await channel.receive())[0])
        if not isinstance(ask, Ask):
            raise ChannelError(f"{type(ask).__name__} is not what was awaited")
        if ask.protocol != PROTOCOL:
            theirs, ours = ask.protocol, PROTOCOL
            raise _DeniedError(f"protocol {theirs} of the decode server is not {ours}")
        if not hmac.compare_digest(ask.proof, proof(self._secret, b"decode", hello, ask)):
            raise _DeniedError("the decode server does not know the secret of disagg.secret_file")
        try:
            theirs = decode_manifest(ask.identity)
        except ConfigError as error:
            raise _DeniedError(f"the decode server is of another version: {error}") from None
        if differences := theirs.differences(self._identity):
            raise _DeniedError(f"prefill and decode server differ: {'; '.join(differences)}")
        return ask, Accepted(proof(self._secret, b"prefill", hello, ask))

    async def _claim(self, ask: Ask) -> int:
        """The room that a decode server asks for, which nobody else gets."""
        if ask.room in self._used:
            raise _DeniedError(f"bootstrap_room {ask.room} was used before")
        if ask.room not in self._rooms:
            arrival = self._arrivals.setdefault(ask.room, asyncio.Event())
            try:
                async with asyncio.timeout(self._patience_s):
                    await arrival.wait()
            except TimeoutError:
                self._arrivals.pop(ask.room, None)
                raise ChannelError(f"nobody came to bootstrap_room {ask.room}") from None
        room = self._rooms.get(ask.room)
        if room is None or room.task is not None:
            raise _DeniedError(f"bootstrap_room {ask.room} was used before")
        if not hmac.compare_digest(room.digest, ask.digest):
            raise _DeniedError("prompt or adapter of the prefill and the decode server differ")
        room.task = asyncio.current_task()
        return ask.room

    async def _send(self, channel: Channel, room: _Room, want: Want) -> str:
        """Send what comes; returns why the job ended, empty if all was received."""
        if self._may_share and want.segment:
            self._share(room, want)
        self._tell(Asked(room.job, want.first))
        answer = asyncio.ensure_future(channel.receive())
        try:
            while True:
                part = await _unless(answer, room.queue.get())
                await _unless(answer, channel.send(encode(part.message), part.buffer))
                self._tell(Sent(room.job, part.num_bytes))
                if part.message.last:
                    break
            said = decode((await answer)[0])
            return "" if isinstance(said, Done) else f"the decode server said {said}"
        finally:
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)

    def _share(self, room: _Room, want: Want) -> None:
        """Send through the decode server's memory, if it can be opened here."""
        path, _, size = want.segment.partition(" ")
        try:
            segment = Segment.open(path, int(size))
        except (OSError, ValueError) as error:
            logger.info("shared memory of the decode server cannot be used: %s", error)
            return
        with self._lock:
            self._shares[room.job] = _Share(segment, want.first)

    def _tell(self, event: Asked | Sent | Over) -> None:
        with self._lock:
            self._events.append(event)


def _wanted(message: Message) -> Want:
    if not isinstance(message, Want) or message.first < 0:
        raise ChannelError(f"{type(message).__name__} is not what was awaited")
    return message


class _DeniedError(Exception):
    """A peer is refused, by name."""


async def _unless(
    answer: asyncio.Future[tuple[bytes, Buffer]], work: Coroutine[Any, Any, Value]
) -> Value:
    """Do something, but stop when the peer speaks or leaves, which it should not do yet."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait((task, answer), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        said = decode(answer.result()[0])
        raise ChannelError(f"the decode server said {said}, before it had everything")
    finally:
        task.cancel()


async def _farewell(channel: Channel, message: Denied | Failed) -> None:
    try:
        async with asyncio.timeout(1.0):
            await channel.send(encode(message))
    except (ChannelError, TimeoutError):
        pass  # it is gone

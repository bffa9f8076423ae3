"""Prefill side of transfers: accepts decode servers, and sends pages to them."""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import threading
from collections import OrderedDict
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import numpy as np

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.core.memory import PageMemory
from sylvan.runtime.features.disagg.channel import Buffer, Channel, ChannelError, Network
from sylvan.runtime.features.disagg.loop_thread import LoopThread
from sylvan.runtime.features.disagg.mechanisms import TransferMechanisms
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
    Redirect,
    RequestPages,
    Unchanged,
    decode,
    encode,
    proof,
)
from sylvan.runtime.features.disagg.page_views import PageViews, checksums, split
from sylvan.runtime.features.disagg.remote_memory import HTTP_PORT, WHERE, where
from sylvan.runtime.features.disagg.segment import SharedSegment
from sylvan.runtime.features.disagg.work import (
    Expose,
    PagesRequested,
    PrefillEvents,
    PrefillWork,
    SendingEnded,
    SendPages,
    Sent,
    Withdraw,
)
from sylvan.runtime.storage.manifest import Manifest, decode_manifest
from sylvan.utils.threads import call_in_thread

logger = logging.getLogger(__name__)

Value = TypeVar("Value")

HANDSHAKE_S = 10.0
USED_ROOMS = 1 << 16
"""Used rooms that are remembered, so that another request for them is rejected."""


@dataclass(slots=True)
class _Part:
    """A page set copied to host memory."""

    message: Pages
    buffer: Buffer


@dataclass(frozen=True, slots=True)
class _Share:
    """Memory of a decode server, for pages from entry `first` on."""

    segment: SharedSegment
    first: int
    page_bytes: int

    def write(self, first: int, buffers: Sequence[Buffer]) -> None:
        """Copy pages from entry `first` on."""
        at = (first - self.first) * self.page_bytes
        for part in buffers:
            self.segment.bytes[at : at + part.nbytes] = part
            at += part.nbytes


@dataclass(slots=True, eq=False)
class _Room:
    """One request. `task` sends once a decode server has connected; `withdrawn`: why it stops."""

    job: int
    digest: bytes
    pulls: bool = False  # the decode server reads this process's memory
    share: _Share | None = None
    queue: asyncio.Queue[_Part | SendPages] = field(default_factory=asyncio.Queue[Any])
    task: asyncio.Task[Any] | None = None
    withdrawn: str = ""


class Sender:
    """Executes `PrefillWork`; `events` reports progress.

    Args:
        network: Creates channels.
        memory: The pages of the model, by KV group.
        identity: What KV depends on; must equal the decode server's.
        secret: Secret shared by both sides.
        mechanisms: Allowed transfer mechanisms.
        patience_s: Longest time a decode server waits for a request that has not arrived here.

    Attributes:
        rank_ports: Port of each rank, for peers that connect to the wrong one.
    """

    def __init__(
        self,
        network: Network,
        memory: Sequence[PageMemory],
        identity: Manifest,
        secret: bytes,
        mechanisms: TransferMechanisms,
        *,
        patience_s: float = 120.0,
    ) -> None:
        self._network, self._memory = network, tuple(memory)
        self._mechanisms = mechanisms
        self._offers = {reader.name: reader.offer() for reader in mechanisms.readers}
        if mechanisms.http_port:
            self._offers[HTTP_PORT] = b"%d" % mechanisms.http_port
        if mechanisms.readers:
            self._offers[WHERE] = msgspec.msgpack.encode(where(self._memory[:1]))
        self._identity, self._secret = identity, secret
        self._patience_s = patience_s
        self.rank_ports: Sequence[int] = ()
        self._views = PageViews(self._memory[0])
        self._thread = LoopThread("sylvan-prefill")
        # owned by the loop's thread:
        self._rooms: dict[int, _Room] = {}
        self._by_job: dict[int, int] = {}
        self._arrivals: dict[int, asyncio.Event] = {}
        self._used: OrderedDict[int, str] = OrderedDict()  # the reason if they were withdrawn
        # shared by both threads:
        self._lock = threading.Lock()
        self._events: list[PagesRequested | Sent | SendingEnded] = []

    def listen(self, host: str, port: int) -> int:
        """Start listening; return the port.

        Raises:
            ConfigError: The address cannot be used.
        """
        try:
            return self._thread.wait(self._network.listen(host, port, self._serve))
        except OSError as error:
            raise ConfigError(
                f"disagg.bootstrap_port={port}: {host} cannot be listened on: {error.strerror}"
            ) from None

    def begin(self, work: PrefillWork) -> None:
        """Start all the work. Copies page sets at once; pages must stay until `SendingEnded`."""
        for item in work:
            match item:
                case Expose():
                    self._thread.call(self._expose, item)
                case SendPages():
                    self._page_sets(item)
                case Withdraw():
                    self._thread.call(self._withdraw, item.job, item.reason)

    def events(self) -> PrefillEvents | None:
        """Return the events since the last call; None: none."""
        with self._lock:
            events, self._events = self._events, []
        return tuple(events) or None

    def close(self) -> None:
        """Close all connections."""
        self._thread.call(self._network.close)
        self._thread.close()
        for reader in self._mechanisms.readers:
            reader.close()

    def _page_sets(self, work: SendPages) -> None:
        """Copy page sets now, because later steps may overwrite them; pages of prompts stay."""
        for page_set in work.page_sets:
            count, memory = len(page_set.pages), self._memory[page_set.group]
            buffer = memory.host_buffer(count)
            transfer = memory.export(np.array(page_set.pages, np.int32), buffer)
            transfer.wait()
            if transfer.error:
                reason = f"pages could not be read: {transfer.error}"
                self._thread.call(self._withdraw, work.job, reason)
                return
            whole = buffer[: count * memory.page_bytes]
            found = checksums(split(whole, count))
            message = Pages(0, count, found, last=False, group=page_set.group)
            self._thread.call(self._put, work.job, _Part(message, whole))
        self._thread.call(self._put, work.job, work)

    # ---- in the loop

    def _expose(self, work: Expose) -> None:
        if work.room in self._rooms or work.room in self._used:
            self._report(SendingEnded(work.job, f"bootstrap_room {work.room} was used before"))
            return
        self._rooms[work.room] = _Room(work.job, work.digest)
        self._by_job[work.job] = work.room
        if (arrival := self._arrivals.pop(work.room, None)) is not None:
            arrival.set()

    def _put(self, job: int, part: _Part | SendPages) -> None:
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
        self._used[number] = room.withdrawn
        if len(self._used) > USED_ROOMS:
            self._used.popitem(last=False)
        self._report(SendingEnded(room.job, error))
        if room.share is not None:
            room.share.segment.close()

    async def _serve(self, channel: Channel) -> None:
        """Serve one connection: authenticate, then send."""
        number = None
        error = "the server ends"
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                ask, accepted = await self._handshake(channel)
            number = await self._reserve_room(ask)
            await channel.send(encode(accepted))
            want = _wanted(decode((await channel.receive())[0]))
            error = await self._send(channel, self._rooms[number], want)
        except asyncio.CancelledError:
            withdrawn = number is not None and self._rooms[number].withdrawn
            if not withdrawn:
                raise  # the server is shutting down
            error = withdrawn
            await _last_message(channel, Failed(error))
        except _WrongServerError as wrong:
            await _last_message(channel, Redirect(wrong.port))
        except _DeniedError as denied:
            error = str(denied)
            logger.warning("a decode server was rejected: %s", denied)
            await _last_message(channel, Denied(error))
        except _GoneError as gone:
            error = str(gone)
            await _last_message(channel, Failed(error))
        except TimeoutError:
            error = "the handshake took too long"
        except ChannelError as failed:
            error = str(failed)
            if number is None:
                logger.warning("a connection of a decode server failed: %s", failed)
        finally:
            if number is not None:
                self._forget(number, error)

    async def _handshake(self, channel: Channel) -> tuple[Ask, Accepted]:
        hello = Hello(PROTOCOL, secrets.token_bytes(NONCE_BYTES))
        await channel.send(encode(hello))
        ask = decode((await channel.receive())[0])
        if not isinstance(ask, Ask):
            raise ChannelError(f"unexpected message {type(ask).__name__}")
        if ask.protocol != PROTOCOL:
            theirs, ours = ask.protocol, PROTOCOL
            raise _DeniedError(f"protocol {theirs} of the decode server is not {ours}")
        if not hmac.compare_digest(ask.proof, proof(self._secret, b"decode", hello, ask)):
            raise _DeniedError("the decode server does not know the secret of disagg.secret_file")
        try:
            theirs = decode_manifest(ask.identity)
        except ConfigError as error:
            raise _DeniedError(f"the decode server is of another version: {error}") from None
        ours, (size, rank) = self._identity.shards, theirs.shards
        if ours != (size, rank) and size == len(self.rank_ports) and 0 <= rank < size:
            raise _WrongServerError(self.rank_ports[rank])
        if differences := theirs.differences(self._identity):
            reason = f"prefill and decode server differ: {'; '.join(differences)}"
            room = self._rooms.get(ask.room)
            if room is not None and room.task is None:  # no other server will ask for it
                self._forget(ask.room, reason)
            raise _DeniedError(reason)
        return ask, Accepted(proof(self._secret, b"prefill", hello, ask), self._offers)

    async def _reserve_room(self, ask: Ask) -> int:
        """Reserve the room that a decode server asks for."""
        if withdrawn := self._used.get(ask.room):
            raise _GoneError(withdrawn)
        if ask.room in self._used:
            raise _DeniedError(f"bootstrap_room {ask.room} was used before")
        if ask.room not in self._rooms:
            arrival = self._arrivals.setdefault(ask.room, asyncio.Event())
            try:
                async with asyncio.timeout(self._patience_s):
                    await arrival.wait()
            except TimeoutError:
                self._arrivals.pop(ask.room, None)
                raise ChannelError(f"no request came to bootstrap_room {ask.room}") from None
        room = self._rooms.get(ask.room)
        if room is None or room.task is not None:
            raise _DeniedError(f"bootstrap_room {ask.room} was used before")
        if not hmac.compare_digest(room.digest, ask.digest):
            raise _DeniedError("prompt or adapter of the prefill and the decode server differ")
        room.task = asyncio.current_task()
        return ask.room

    async def _send(self, channel: Channel, room: _Room, want: RequestPages) -> str:
        """Send what becomes ready; return why the job ended, empty if all was received."""
        room.pulls = bool(want.pull)
        if room.pulls and want.pull not in [reader.name for reader in self._mechanisms.readers]:
            raise ChannelError(f"memory of this server is not read by {want.pull!r}")
        if self._mechanisms.shares is not False and want.segment and not room.pulls:
            self._share(room, want)
        self._report(PagesRequested(room.job, want.first))
        answer = asyncio.ensure_future(channel.receive())
        try:
            last = False
            while not last:
                part = await _unless_peer_speaks(answer, room.queue.get())
                if isinstance(part, _Part):
                    message = encode(part.message)
                    await _unless_peer_speaks(answer, channel.send(message, [part.buffer]))
                    self._report(Sent(room.job, part.buffer.nbytes))
                    continue
                await _unless_peer_speaks(answer, self._send_pages(channel, room, part))
                last = part.last
            said = decode((await answer)[0])
            if not isinstance(said, Done):
                return f"the decode server said {said}"
            if room.pulls:
                await channel.send(encode(Unchanged()))
        except OSError as error:
            await _last_message(channel, Failed(f"pages could not be read: {error}"))
            return str(error)
        else:
            return ""
        finally:
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)

    async def _send_pages(self, channel: Channel, room: _Room, work: SendPages) -> None:
        """Send pages in chunks, or their addresses."""
        count = len(work.pages)
        if room.pulls or not count:
            message = Pages(work.first, count, b"", work.last, pages=work.pages)
            await channel.send(encode(message))
            self._report(Sent(room.job, count * self._memory[0].page_bytes))
            return
        each = self._views.chunk_pages(copied=room.share is not None)
        starts = range(0, count, each)
        chunks = [work.pages[i : i + each] for i in starts]
        ready = asyncio.ensure_future(call_in_thread(self._views.read, chunks[0]))
        try:
            for number, chunk in enumerate(chunks):
                buffers, found = await ready
                if number + 1 < len(chunks):
                    ready = asyncio.ensure_future(
                        call_in_thread(self._views.read, chunks[number + 1])
                    )
                first = work.first + starts[number]
                last = work.last and number + 1 == len(chunks)
                message = Pages(first, len(chunk), found, last, room.share is not None)
                if room.share is not None:
                    await call_in_thread(room.share.write, first, buffers)
                    buffers = []
                await channel.send(encode(message), buffers)
                self._report(Sent(room.job, len(chunk) * self._memory[0].page_bytes))
        finally:
            ready.cancel()
            await asyncio.gather(ready, return_exceptions=True)

    def _share(self, room: _Room, want: RequestPages) -> None:
        """Send through the decode server's shared memory, if it can be opened here."""
        path, _, size = want.segment.partition(" ")
        try:
            segment = SharedSegment.open(path, int(size))
        except (OSError, ValueError) as error:
            logger.info("shared memory of the decode server cannot be used: %s", error)
            return
        room.share = _Share(segment, want.first, self._memory[0].page_bytes)

    def _report(self, event: PagesRequested | Sent | SendingEnded) -> None:
        with self._lock:
            self._events.append(event)


def _wanted(message: Message) -> RequestPages:
    if not isinstance(message, RequestPages) or message.first < 0:
        raise ChannelError(f"unexpected message {type(message).__name__}")
    return message


class _DeniedError(Exception):
    """The peer is rejected, with a reason."""


class _WrongServerError(Exception):
    """Another rank's server, at `port`, has what this peer wants."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self.port = port


class _GoneError(Exception):
    """The request of a room ended before a decode server connected."""


async def _unless_peer_speaks(
    answer: asyncio.Future[tuple[bytes, Sequence[Buffer]]], work: Coroutine[Any, Any, Value]
) -> Value:
    """Await something, but stop if the peer speaks or disconnects, which it should not do yet."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait((task, answer), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        said = decode(answer.result()[0])
        raise ChannelError(f"the decode server said {said}, before it had everything")
    finally:
        task.cancel()


async def _last_message(channel: Channel, message: Denied | Redirect | Failed) -> None:
    try:
        async with asyncio.timeout(1.0):
            await channel.send(encode(message))
    except (ChannelError, TimeoutError):
        pass  # disconnected

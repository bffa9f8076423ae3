"""Decode side of the transfer: meets prefill servers, and fills pages with what they send."""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import threading
import time
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import numpy as np

from sylvan.runtime.core.memory import PageMemory, Transfer
from sylvan.runtime.features.disagg.channel import Buffer, Channel, ChannelError, Network
from sylvan.runtime.features.disagg.data import (
    DecodeEvents,
    DecodeWork,
    Join,
    Leave,
    Left,
    Lost,
    Progress,
    Receive,
    Received,
    Refused,
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
from sylvan.runtime.storage.manifest import Manifest
from sylvan.utils.threads import call_in_thread

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=msgspec.Struct)

HANDSHAKE_S = 10.0
Event = Progress | Received | Refused | Lost | Left


@dataclass(slots=True, eq=False)
class _Job:
    """One request: `wanted` is set once it has memory."""

    wanted: asyncio.Future[Receive]
    task: asyncio.Task[None] | None = None
    transfer: Transfer | None = None
    segments: list[Segment] = field(default_factory=list[Segment])


class Receiver:
    """Carries out `DecodeWork`; `events` tells what has happened since.

    Args:
        network: Makes channels.
        memory: The pages of the model.
        identity: What KV depends on: prefill servers must have the same.
        secret: Known to both sides.
        shares: Whether pages may come through shared memory: always, never, or (None) when the
            prefill server is on this machine.
    """

    def __init__(
        self,
        network: Network,
        memory: PageMemory,
        identity: Manifest,
        secret: bytes,
        *,
        shares: bool | None = None,
    ) -> None:
        self._network, self._memory = network, memory
        self._identity, self._secret = identity.encode(), secret
        self._shares = shares
        self._thread = LoopThread("sylvan-decode")
        self._jobs: dict[int, _Job] = {}  # of the loop's thread
        self._lock = threading.Lock()
        self._events: list[Event] = []

    def begin(self, work: DecodeWork) -> None:
        """Begin all of it; returns at once."""
        for item in work:
            match item:
                case Join():
                    self._thread.call(self._join, item)
                case Receive():
                    self._thread.call(self._receive, item)
                case Leave():
                    self._thread.call(self._leave, item.job)

    def events(self) -> DecodeEvents | None:
        """What has happened since the last call; None: nothing."""
        with self._lock:
            events, self._events = self._events, []
        return tuple(events) or None

    def close(self) -> None:
        """End all connections."""
        self._thread.close()

    # ---- in the loop

    def _join(self, work: Join) -> None:
        job = _Job(asyncio.get_running_loop().create_future())
        self._jobs[work.job] = job
        job.task = asyncio.ensure_future(self._run(work, job))

    def _receive(self, work: Receive) -> None:
        job = self._jobs.get(work.job)
        if job is not None and not job.wanted.done():
            job.wanted.set_result(work)

    def _leave(self, number: int) -> None:
        job = self._jobs.get(number)
        if job is not None and job.task is not None:
            job.task.cancel()

    async def _run(self, work: Join, job: _Job) -> None:
        """One job, from the first word to the last."""
        ended: Event = Left(work.job)
        channel = None
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                channel = await self._network.connect(work.host, work.port)
                hello, ask = await self._ask(channel, work)
            await self._await_acceptance(channel, hello, ask)
            self._tell(Progress(work.job))
            wanted = await _unless_ended(channel, job.wanted)
            began = time.monotonic()
            size = await self._fill(channel, job, wanted)
            await channel.send(encode(Done()))
            ended = Received(work.job, size, time.monotonic() - began)
        except _RefusedError as refused:
            ended = Refused(work.job, str(refused))
        except TimeoutError:
            where = f"{work.host}:{work.port}"
            ended = Lost(work.job, f"prefill server {where}: the handshake took too long")
        except ChannelError as error:
            ended = Lost(work.job, f"prefill server {work.host}:{work.port}: {error}")
        except OSError as error:
            ended = Lost(work.job, f"no shared memory: {error}")
        except asyncio.CancelledError:
            pass  # it was told to leave
        finally:
            if channel is not None:
                channel.close()
            if job.transfer is not None:
                job.transfer.wait()  # milliseconds; then nothing writes pages any more
            for segment in job.segments:
                segment.close()
            del self._jobs[work.job]
            self._tell(ended)

    async def _ask(self, channel: Channel, work: Join) -> tuple[Hello, Ask]:
        hello = await _next(channel, Hello)
        if hello.protocol != PROTOCOL:
            raise _RefusedError(
                f"protocol {hello.protocol} of the prefill server is not {PROTOCOL}"
            )
        nonce = secrets.token_bytes(NONCE_BYTES)
        ask = Ask(PROTOCOL, nonce, b"", self._identity, work.room, work.digest)
        mine = proof(self._secret, b"decode", hello, ask)
        await channel.send(encode(Ask(PROTOCOL, nonce, mine, ask.identity, ask.room, ask.digest)))
        return hello, ask

    async def _await_acceptance(self, channel: Channel, hello: Hello, ask: Ask) -> None:
        accepted = await _next(channel, Accepted)
        if not hmac.compare_digest(accepted.proof, proof(self._secret, b"prefill", hello, ask)):
            raise _RefusedError("the prefill server does not know the secret of disagg.secret_file")

    async def _fill(self, channel: Channel, job: _Job, work: Receive) -> int:
        """Receive all pages; returns their bytes."""
        size, count = self._memory.page_bytes, len(work.pages)
        segment = self._segment(channel, job, count * size)
        path = f"{segment.path} {count * size}" if segment is not None else ""
        await channel.send(encode(Want(work.first, path)))
        done = 0
        while True:
            pages, payload = await _next_pages(channel, (count - done) * size)
            if pages.first != work.first + done or not 0 <= pages.count <= count - done:
                raise ChannelError(f"pages from {pages.first} on are not what was awaited")
            if pages.in_segment:
                if segment is None:
                    raise ChannelError("pages are said to be where no memory is shared")
                payload = segment.bytes[done * size : (done + pages.count) * size]
            elif self._shares and count:
                raise ChannelError("disagg.transfer=shm: the prefill server shares no memory")
            if payload.nbytes != pages.count * size or len(pages.checksums) != pages.count * 8:
                raise ChannelError(f"{payload.nbytes} bytes are not {pages.count} pages")
            targets = work.pages[done : done + pages.count]
            if targets:
                await self._import(job, targets, payload, pages.checksums)
            done += pages.count
            if pages.last:
                break
        if done != count:
            raise ChannelError(f"only {done} of {count} pages came")
        return count * size

    def _segment(self, channel: Channel, job: _Job, num_bytes: int) -> Segment | None:
        wanted = channel.same_machine if self._shares is None else self._shares
        if not wanted or not num_bytes:
            return None
        try:
            segment = Segment.create(num_bytes)
        except OSError:
            if self._shares:
                raise
            return None
        job.segments.append(segment)
        return segment

    async def _import(
        self, job: _Job, targets: tuple[int, ...], payload: Buffer, checksums: bytes
    ) -> None:
        job.transfer = transfer = self._memory.import_(
            np.array(targets, np.int32), payload, checksums=np.frombuffer(checksums, "<u8")
        )
        await call_in_thread(transfer.wait)
        job.transfer = None
        if transfer.error:
            raise ChannelError(f"pages could not be used: {transfer.error}")

    def _tell(self, event: Event) -> None:
        with self._lock:
            self._events.append(event)


class _RefusedError(Exception):
    """The two servers must not exchange KV."""


async def _next_pages(channel: Channel, most: int) -> tuple[Pages, Buffer]:
    data, payload = await channel.receive(most)
    return _expected(decode(data), Pages), payload


async def _next(channel: Channel, kind: type[M]) -> M:
    data, _ = await channel.receive()
    return _expected(decode(data), kind)


def _expected(message: Message, kind: type[M]) -> M:
    if isinstance(message, Denied):
        raise _RefusedError(message.reason)
    if isinstance(message, Failed):
        raise ChannelError(message.reason)
    if not isinstance(message, kind):
        raise ChannelError(f"{type(message).__name__} is not what was awaited")
    return message


async def _unless_ended(channel: Channel, wanted: asyncio.Future[Receive]) -> Receive:
    """What is wanted, unless the prefill server ends the connection before."""
    said = asyncio.ensure_future(channel.receive())
    try:
        await asyncio.wait((said, wanted), return_when=asyncio.FIRST_COMPLETED)
        if wanted.done():
            return wanted.result()
        said_first = _expected(decode(said.result()[0]), Hello)
        raise ChannelError(f"the prefill server said {said_first} again")
    finally:
        said.cancel()
        await asyncio.gather(said, return_exceptions=True)

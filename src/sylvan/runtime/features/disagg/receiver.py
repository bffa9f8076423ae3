"""Decode side of transfers: connects to prefill servers, and fills pages with what they send."""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import numpy as np

from sylvan.runtime.core.memory import Checksums, PageMemory, Transfer
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
from sylvan.runtime.features.disagg.prefill_client import PrefillClient
from sylvan.runtime.features.disagg.remote_memory import (
    HTTP_PORT,
    WHERE,
    Peer,
    Pieces,
    RemoteReadError,
    Where,
    pieces,
    read_where,
    where,
)
from sylvan.runtime.features.disagg.segment import SharedSegment
from sylvan.runtime.features.disagg.work import (
    DecodeEvents,
    DecodeWork,
    JoinRoom,
    Leave,
    LeaveDone,
    PageSet,
    PrefillAgain,
    Progress,
    Receive,
    Received,
    Refused,
    TransferFailed,
)
from sylvan.runtime.pool.transfers import ThreadedTransfer
from sylvan.runtime.storage.manifest import Manifest
from sylvan.utils.tasks import settled
from sylvan.utils.threads import call_in_thread

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=msgspec.Struct)

HANDSHAKE_S = 10.0
PULLERS = 2
"""Threads that read the memory of prefill servers."""
CHECKS = 2
"""Chunks that are verified while the next ones arrive."""
Event = Progress | Received | Refused | TransferFailed | LeaveDone


@dataclass(slots=True, eq=False)
class _Incoming:
    """One request: `wanted` is set once it has memory; `gave_up` says why its room stays empty."""

    wanted: asyncio.Future[Receive]
    task: asyncio.Task[None] | None = None
    begun: bool = False  # the task runs, and reports its own end
    asking: asyncio.Task[None] | None = None
    gave_up: str = ""
    transfers: list[Transfer] = field(default_factory=list[Transfer])
    segments: list[SharedSegment] = field(default_factory=list[SharedSegment])

    def close(self) -> None:
        """Wait for running copies, which takes milliseconds; then nothing writes pages any more."""
        if self.asking is not None:
            self.asking.cancel()
        for transfer in self.transfers:
            transfer.wait()
        for segment in self.segments:
            segment.close()


@dataclass(frozen=True, slots=True)
class _Reached:
    """A prefill server whose memory can be read, and its page layout."""

    name: str
    peer: Peer
    where: Where


@dataclass(slots=True, eq=False)
class _Filling:
    """Progress of a job: pages received, and page sets still missing."""

    job: _Incoming
    work: Receive
    reached: _Reached | None
    segment: SharedSegment | None
    page_sets: dict[int, PageSet] = field(init=False)
    done: int = 0
    checks: list[asyncio.Task[None]] = field(default_factory=list[asyncio.Task[None]])

    def __post_init__(self) -> None:
        self.page_sets = {page_set.group: page_set for page_set in self.work.page_sets}


class Receiver:
    """Executes `DecodeWork`; `events` reports progress.

    Args:
        network: Creates channels.
        memory: The pages of the model, by KV group.
        identity: What KV depends on; must equal the prefill server's.
        secret: Secret shared by both sides.
        mechanisms: Allowed transfer mechanisms.
        client: Asks prefill servers to prefill again.
    """

    def __init__(
        self,
        network: Network,
        memory: Sequence[PageMemory],
        identity: Manifest,
        secret: bytes,
        mechanisms: TransferMechanisms,
        client: PrefillClient | None = None,
    ) -> None:
        self._client = client or PrefillClient()
        self._network, self._memory = network, tuple(memory)
        self._mechanisms = mechanisms
        self._where = where(self._memory)[0]
        self._views = PageViews(self._memory[0])
        self._copier = ThreadPoolExecutor(PULLERS, "sylvan-pull")  # created with the first job
        self._identity, self._secret = identity.encode(), secret
        self._thread = LoopThread("sylvan-decode")
        self._jobs: dict[int, _Incoming] = {}  # owned by the loop's thread
        self._lock = threading.Lock()
        self._events: list[Event] = []

    def begin(self, work: DecodeWork) -> None:
        """Start all the work; returns at once."""
        for item in work:
            match item:
                case JoinRoom():
                    self._thread.call(self._join, item)
                case PrefillAgain():
                    self._thread.call(self._ask_again, item)
                case Receive():
                    self._thread.call(self._receive, item)
                case Leave():
                    self._thread.call(self._leave, item.job)

    def events(self) -> DecodeEvents | None:
        """Return the events since the last call; None: none."""
        with self._lock:
            events, self._events = self._events, []
        return tuple(events) or None

    def close(self) -> None:
        """Close all connections."""
        self._thread.close()
        self._copier.shutdown()
        for reader in self._mechanisms.readers:
            reader.close()

    # ---- in the loop

    def _join(self, work: JoinRoom) -> None:
        job = _Incoming(asyncio.get_running_loop().create_future())
        self._jobs[work.job] = job
        job.task = asyncio.ensure_future(self._run(work, job))

    def _ask_again(self, work: PrefillAgain) -> None:
        job = self._jobs.get(work.job)
        if job is not None:
            job.asking = asyncio.ensure_future(self._asked(work, job))

    async def _asked(self, work: PrefillAgain, job: _Incoming) -> None:
        """Ask for another prefill; end the job if that fails, because its room would stay empty."""
        try:
            await self._client.ask(work)
        except ChannelError as error:
            logger.warning("%s", error)
            if job.task is not None:
                job.gave_up = str(error)
                job.task.cancel()

    def _receive(self, work: Receive) -> None:
        job = self._jobs.get(work.job)
        if job is not None and not job.wanted.done():
            job.wanted.set_result(work)

    def _leave(self, number: int) -> None:
        job = self._jobs.get(number)
        if job is None or job.task is None:
            return
        job.task.cancel()
        if not job.begun:  # asyncio drops a task that is cancelled before its first step
            job.close()
            del self._jobs[number]
            self._report(LeaveDone(number))

    async def _run(self, work: JoinRoom, job: _Incoming) -> None:
        """Run one job from connecting to its end."""
        job.begun = True
        ended: Event = LeaveDone(work.job)
        channel = None
        try:
            channel, accepted = await self._enter(work)
            self._client.learn(work.host, work.port, accepted.offers.get(HTTP_PORT, b""))
            self._report(Progress(work.job))
            reached = self._reach(channel, accepted)
            wanted = await _unless_ended(channel, job.wanted)
            began = time.monotonic()
            size = await self._fill(channel, job, wanted, reached)
            await channel.send(encode(Done()))
            if reached is not None:
                await _next(channel, Unchanged)
            ended = Received(work.job, size, time.monotonic() - began)
        except _RefusedError as refused:
            ended = Refused(work.job, str(refused))
        except TimeoutError:
            place = f"{work.host}:{work.port}"
            ended = TransferFailed(work.job, f"prefill server {place}: the handshake took too long")
        except (ChannelError, RemoteReadError) as error:
            ended = TransferFailed(work.job, f"prefill server {work.host}:{work.port}: {error}")
        except OSError as error:
            ended = TransferFailed(work.job, f"no shared memory: {error}")
        except asyncio.CancelledError:
            if job.gave_up:  # otherwise it was asked to leave
                ended = TransferFailed(work.job, job.gave_up)
        finally:
            if channel is not None:
                channel.close()
            job.close()
            del self._jobs[work.job]
            self._report(ended)

    async def _enter(self, work: JoinRoom) -> tuple[Channel, Accepted]:
        """Connect to the rank of the prefill server that has this rank's part."""
        channel, answer = await self._request(work, work.port)
        if isinstance(answer, Redirect):
            channel.close()
            channel, answer = await self._request(work, answer.port)
        if not isinstance(answer, Accepted):
            channel.close()
            raise ChannelError("no rank has the part of this one")
        return channel, answer

    async def _request(self, work: JoinRoom, port: int) -> tuple[Channel, Accepted | Redirect]:
        """Request a part from the server at a port."""
        channel = None
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                channel = await self._network.connect(work.host, port)
                hello, ask = await self._identify(channel, work)
            return channel, await self._await_answer(channel, hello, ask)
        except BaseException:
            if channel is not None:
                channel.close()
            raise

    async def _identify(self, channel: Channel, work: JoinRoom) -> tuple[Hello, Ask]:
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

    async def _await_answer(self, channel: Channel, hello: Hello, ask: Ask) -> Accepted | Redirect:
        answer = decode((await channel.receive())[0])
        if isinstance(answer, Redirect):
            return answer
        accepted = _expected(answer, Accepted)
        if not hmac.compare_digest(accepted.proof, proof(self._secret, b"prefill", hello, ask)):
            raise _RefusedError("the prefill server has another secret (disagg.secret_file)")
        return accepted

    def _reach(self, channel: Channel, accepted: Accepted) -> _Reached | None:
        """Connect to the prefill server's memory, if a mechanism works."""
        reasons: list[str] = []
        for reader in self._mechanisms.readers:
            offer = accepted.offers.get(reader.name)
            if offer is None or (reader.local and not channel.same_machine):
                reasons.append(f"{reader.name}: not offered")
                continue
            try:
                there = read_where(accepted.offers.get(WHERE, b""))
                return _Reached(reader.name, reader.connect(offer), there[0])
            except RemoteReadError as error:
                logger.info("%s of a prefill server cannot be used: %s", reader.name, error)
                reasons.append(f"{reader.name}: {error}")
        if self._mechanisms.needs_reader:
            raise _RefusedError(f"its memory cannot be read ({'; '.join(reasons)})")
        return None

    async def _fill(
        self, channel: Channel, job: _Incoming, work: Receive, reached: _Reached | None
    ) -> int:
        """Receive all pages and page sets; return the number of bytes."""
        count, size = len(work.pages), self._memory[0].page_bytes
        segment = None if reached else self._segment(channel, job, count * size)
        path = f"{segment.path} {count * size}" if segment is not None else ""
        pull = reached.name if reached else ""
        page_sets = tuple(page_set.group for page_set in work.page_sets)
        await channel.send(encode(RequestPages(work.first, path, pull, page_sets)))
        filling = _Filling(job, work, reached, segment)
        try:
            while await self._fill_some(channel, filling):
                pass
            for check in filling.checks:
                await check
        finally:
            for check in filling.checks:
                check.cancel()
            await asyncio.gather(*filling.checks, return_exceptions=True)
        if filling.done != count or filling.page_sets:
            left = sorted(filling.page_sets)
            raise ChannelError(f"only {filling.done} of {count} pages came, and not groups {left}")
        return count * size + sum(map(self._num_bytes, work.page_sets))

    async def _fill_some(self, channel: Channel, filling: _Filling) -> bool:
        """Process one message; return whether more follow."""
        job, work, done = filling.job, filling.work, filling.done
        rest = PageSet(0, work.pages[done:])
        pages, payload = await self._next_pages(channel, rest, filling.page_sets)
        if pages.group >= 0:
            await self._take_page_set(job, pages, payload, filling.page_sets)
            return not pages.last
        if pages.first != work.first + done or not 0 <= pages.count <= len(rest.pages):
            raise ChannelError(f"pages from {pages.first} on are not what was awaited")
        mine = rest.pages[: pages.count]
        filling.done += pages.count
        if not mine:
            return not pages.last
        if filling.reached is not None:
            await self._pull(job, mine, pages, filling.reached)
            return not pages.last
        if pages.in_segment and filling.segment is not None:
            size = self._memory[0].page_bytes
            payload = [filling.segment.bytes[done * size : filling.done * size]]
        elif self._mechanisms.shares:
            raise ChannelError("disagg.transfer=shm: the prefill server shares no memory")
        filling.checks.append(asyncio.ensure_future(self._take(job, mine, pages, payload)))
        if len(filling.checks) > CHECKS:
            await filling.checks.pop(0)
        return not pages.last

    def _num_bytes(self, page_set: PageSet) -> int:
        return len(page_set.pages) * self._memory[page_set.group].page_bytes

    async def _next_pages(
        self, channel: Channel, rest: PageSet, page_sets: Mapping[int, PageSet]
    ) -> tuple[Pages, Sequence[Buffer]]:
        """Receive the next message; pages of the first group are written in place."""
        limit = max(map(self._num_bytes, (rest, *page_sets.values())))

        def place(message: bytes, num_bytes: int) -> Sequence[Buffer]:
            found = decode(message)
            size = self._memory[0].page_bytes
            if (
                isinstance(found, Pages)
                and found.group < 0
                and self._views.direct
                and num_bytes == found.count * size
            ):
                return self._views.views(rest.pages[: found.count])
            return [np.empty(num_bytes, np.uint8)]

        data, payload = await channel.receive(limit, place)
        return _expected(decode(data), Pages), payload

    async def _take_page_set(
        self, job: _Incoming, pages: Pages, payload: Sequence[Buffer], page_sets: dict[int, PageSet]
    ) -> None:
        """Fill a page set with the received bytes."""
        page_set = page_sets.pop(pages.group, None)
        if page_set is None or pages.count != len(page_set.pages) or pages.last:
            raise ChannelError(f"pages of KV group {pages.group} are not what was awaited")
        await self._import(job, page_set, pages, payload)

    async def _take(
        self, job: _Incoming, mine: tuple[int, ...], pages: Pages, payload: Sequence[Buffer]
    ) -> None:
        """Verify pages written in place, or write them."""
        if pages.in_segment or not self._views.direct:
            await self._import(job, PageSet(0, mine), pages, payload)
            return
        size = sum(part.nbytes for part in payload)
        if size != self._num_bytes(PageSet(0, mine)) or len(pages.checksums) != 8 * pages.count:
            raise ChannelError(f"{size} bytes are not {pages.count} pages")
        if not await call_in_thread(self._views.hold, mine, pages.checksums):
            raise ChannelError("pages could not be used: their checksums are wrong")

    async def _pull(
        self, job: _Incoming, mine: tuple[int, ...], pages: Pages, reached: _Reached
    ) -> None:
        """Copy pages from the other process's memory."""
        if len(pages.pages) != len(mine):
            raise ChannelError(f"{len(pages.pages)} numbers are not {len(mine)} pages")
        if not mine:
            return
        step = -(-len(mine) // PULLERS)
        reading: list[tuple[Transfer, Future[Checksums | None]]] = []
        for at in range(0, len(mine), step):
            some, theirs = mine[at : at + step], pages.pages[at : at + step]
            found = pieces(self._where, some, reached.where, theirs)
            future = self._copier.submit(_read, reached.peer, found)
            transfer = ThreadedTransfer(self._num_bytes(PageSet(0, some)), future)
            reading.append((transfer, future))
            job.transfers.append(transfer)  # must be awaited however the job ends
        for transfer, future in reading:
            outcome = await settled(asyncio.shield(asyncio.wrap_future(future)))
            job.transfers.remove(transfer)
            if isinstance(outcome, BaseException):
                raise ChannelError(f"pages could not be used: {outcome}")

    async def _import(
        self, job: _Incoming, page_set: PageSet, pages: Pages, payload: Sequence[Buffer]
    ) -> None:
        """Write pages from a buffer."""
        size = sum(part.nbytes for part in payload)
        if size != self._num_bytes(page_set) or len(pages.checksums) != 8 * pages.count:
            raise ChannelError(f"{size} bytes are not {pages.count} pages")
        found = await call_in_thread(checksums, split(payload[0], pages.count))
        if found != pages.checksums:
            raise ChannelError("pages could not be used: their checksums are wrong")
        numbers = np.array(page_set.pages, np.int32)
        await self._until(job, self._memory[page_set.group].import_(numbers, payload[0]))

    async def _until(self, job: _Incoming, transfer: Transfer) -> None:
        """Wait for a copy even if the job is cancelled."""
        if transfer not in job.transfers:
            job.transfers.append(transfer)
        await call_in_thread(transfer.wait)
        job.transfers.remove(transfer)
        if transfer.error:
            raise ChannelError(f"pages could not be used: {transfer.error}")

    def _segment(self, channel: Channel, job: _Incoming, num_bytes: int) -> SharedSegment | None:
        shares = self._mechanisms.shares
        wanted = channel.same_machine if shares is None else shares
        if not wanted or not num_bytes:
            return None
        try:
            segment = SharedSegment.create(num_bytes)
        except OSError:
            if self._mechanisms.shares:
                raise
            return None
        job.segments.append(segment)
        return segment

    def _report(self, event: Event) -> None:
        with self._lock:
            self._events.append(event)


class _RefusedError(Exception):
    """The two servers must not exchange KV."""


def _read(peer: Peer, found: Pieces) -> Checksums | None:
    peer.read(found)
    return None  # the writer of the pages guarantees their contents


async def _next(channel: Channel, kind: type[M]) -> M:
    data, _ = await channel.receive()
    return _expected(decode(data), kind)


def _expected(message: Message, kind: type[M]) -> M:
    if isinstance(message, Denied):
        raise _RefusedError(message.reason)
    if isinstance(message, Failed):
        raise ChannelError(message.reason)
    if not isinstance(message, kind):
        raise ChannelError(f"unexpected message {type(message).__name__}")
    return message


async def _unless_ended(channel: Channel, wanted: asyncio.Future[Receive]) -> Receive:
    """Await something, unless the prefill server closes the connection first."""
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

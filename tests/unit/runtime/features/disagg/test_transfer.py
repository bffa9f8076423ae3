"""Sender and receiver: every mechanism moves the same bytes, and failures are reported."""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import pytest

from sylvan.runtime.features.disagg.attach import Attach
from sylvan.runtime.features.disagg.mechanisms import TransferMechanisms, transfer_mechanisms
from sylvan.runtime.features.disagg.receiver import Receiver
from sylvan.runtime.features.disagg.remote_memory import RemoteReadError, pieces, where
from sylvan.runtime.features.disagg.sender import Sender
from sylvan.runtime.features.disagg.work import (
    Expose,
    JoinRoom,
    Leave,
    LeaveDone,
    PageSet,
    PagesRequested,
    Receive,
    Received,
    Refused,
    SendingEnded,
    SendPages,
    TransferFailed,
    Withdraw,
)
from tests.support.transfer import (
    Faults,
    FaultyNetwork,
    content,
    manifest,
    paged,
    states,
    until,
)

HOST = "127.0.0.1"
DIGEST = b"d" * 16
TRANSFERS = [
    "tcp",
    "segment",
    "attach",
    *(name for name in ("nixl", "mooncake") if importlib.util.find_spec(name)),
]


@dataclass
class Ends:
    sender: Sender
    receiver: Receiver
    source: list[Any]
    target: list[Any]
    port: int

    def __post_init__(self) -> None:
        self.sent: list[Any] = []
        self.got: list[Any] = []

    def wait(self, kind: type) -> Any:
        """The next event of a kind, on either side."""

        def look() -> Any:
            self.sent += self.sender.events() or ()
            self.got += self.receiver.events() or ()
            return next((e for e in (*self.sent, *self.got) if isinstance(e, kind)), None)

        found = until(look)
        self.sent = [e for e in self.sent if e is not found]
        self.got = [e for e in self.got if e is not found]
        return found

    def join(self, room: int = 7, digest: bytes = DIGEST) -> None:
        self.receiver.begin((JoinRoom(1, HOST, self.port, room, digest),))


def ends(
    transfer: str = "tcp",
    *,
    faults: Faults | None = None,
    secrets: tuple[bytes, bytes] = (b"", b""),
    theirs: Any = None,
    ours: Any = None,
    regions: int = 3,
) -> Ends:
    source, target = [paged(12, 1, regions=regions), paged(6, 2), states(4, 3)], []
    target = [paged(12, 4, regions=regions), paged(6, 5), states(4, 6)]
    name = {"attach": "shm"}.get(transfer, transfer)
    how = [
        TransferMechanisms(shares=True)
        if transfer == "segment"
        else transfer_mechanisms(name, memory, HOST)
        for memory in (source, target)
    ]
    if transfer == "attach":
        how[1] = replace(how[1], needs_reader=True)
    network = FaultyNetwork(faults or Faults())
    sender = Sender(network, source, ours or manifest(), secrets[0], how[0])
    receiver = Receiver(
        FaultyNetwork(faults or Faults()),
        target,
        theirs or manifest(),
        secrets[1],
        how[1],
    )
    return Ends(sender, receiver, source, target, sender.listen(HOST, 0))


@pytest.fixture
def opened() -> Iterator[list[Ends]]:
    found: list[Ends] = []
    yield found
    for pair in found:
        pair.receiver.close()
        pair.sender.close()


@pytest.mark.parametrize("regions", [1, 3])
@pytest.mark.parametrize("transfer", TRANSFERS)
def test_pages_windows_and_states_arrive_as_they_were(opened, transfer, regions):
    pair = ends(transfer, regions=regions)
    opened.append(pair)
    pair.sender.begin((Expose(1, 7, DIGEST),))
    pair.join()
    page_sets = (PageSet(1, (5, 1)), PageSet(2, (2,)))
    pair.receiver.begin((Receive(1, 2, (9, 3, 4, 1), page_sets),))
    asked = pair.wait(PagesRequested)
    assert asked.first == 2

    pair.sender.begin((SendPages(1, 2, (6, 7), last=False),))
    last = SendPages(1, 4, (8, 2), last=True, page_sets=(PageSet(1, (3, 4)), PageSet(2, (1,))))
    pair.sender.begin((last,))

    received, over = pair.wait(Received), pair.wait(SendingEnded)
    assert over.error == ""
    for group, mine, others in (
        (0, (9, 3, 4, 1), (6, 7, 8, 2)),
        (1, (5, 1), (3, 4)),
        (2, (2,), (1,)),
    ):
        assert content(pair.target[group], mine) == content(pair.source[group], others)
    assert received.num_bytes == sum(
        n * part.page_bytes for n, part in zip((4, 2, 1), pair.source, strict=True)
    )


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_nothing_may_be_wanted(opened, transfer):
    pair = ends(transfer)
    opened.append(pair)
    pair.join()
    pair.receiver.begin((Receive(1, 3, ()),))
    pair.sender.begin((Expose(1, 7, DIGEST),))
    pair.wait(PagesRequested)

    pair.sender.begin((SendPages(1, 3, (), last=True),))

    assert pair.wait(Received).num_bytes == 0
    assert pair.wait(SendingEnded).error == ""


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_a_withdrawn_prompt_is_lost_with_the_reason(opened, transfer):
    pair = ends(transfer)
    opened.append(pair)
    pair.sender.begin((Expose(1, 7, DIGEST),))
    pair.join()
    pair.receiver.begin((Receive(1, 0, (1, 2)),))
    pair.wait(PagesRequested)
    pair.sender.begin((SendPages(1, 0, (1,), last=False), Withdraw(1, "it was aborted")))

    assert "it was aborted" in pair.wait(TransferFailed).reason
    assert pair.wait(SendingEnded).error == "it was aborted"


def test_pages_that_did_not_stay_are_not_believed(opened):
    """The prefill server gives up a request whose pages are being read."""
    pair = ends("attach")
    opened.append(pair)
    pair.sender.begin((Expose(1, 7, DIGEST),))
    pair.join()
    pair.receiver.begin((Receive(1, 0, (1, 2)),))
    pair.wait(PagesRequested)

    pair.sender.begin((SendPages(1, 0, (1, 2), last=False), Withdraw(1, "too late")))

    assert "too late" in pair.wait(TransferFailed).reason


def test_a_request_that_leaves_at_once_has_left(opened):
    pair = ends()
    opened.append(pair)
    jobs = range(200)

    for job in jobs:
        join = JoinRoom(job, HOST, pair.port, job, DIGEST)
        pair.receiver.begin((join, Leave(job)))

    left = sorted(pair.wait(LeaveDone).job for _ in jobs)
    assert left == list(jobs)


def test_one_that_leaves_writes_nothing_more(opened):
    pair = ends("tcp")
    opened.append(pair)
    pair.sender.begin((Expose(1, 7, DIGEST),))
    pair.join()
    pair.receiver.begin((Receive(1, 0, (1, 2)),))
    pair.wait(PagesRequested)
    before = content(pair.target[0], (1, 2))

    pair.receiver.begin((Leave(1),))

    pair.wait(LeaveDone)
    pair.sender.begin((SendPages(1, 0, (3, 4), last=True),))
    assert pair.wait(SendingEnded).error
    assert content(pair.target[0], (1, 2)) == before


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"theirs": manifest(page_size=32)}, "page_size is 16, not 32"),
        ({"theirs": manifest(kv_dtype="int8")}, "kv_dtype is model, not int8"),
        ({"theirs": manifest(shards=(2, 0))}, "shards is (1, 0), not (2, 0)"),
        ({"theirs": manifest(weights="x")}, "weights is w, not x"),
        ({"theirs": manifest(version="2")}, "version is 1, not 2"),
        ({"secrets": (b"a" * 16, b"b" * 16)}, "does not know the secret"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_servers_that_do_not_fit_refuse_by_name(opened, given, reason):
    pair = ends("tcp", **given)
    opened.append(pair)
    pair.sender.begin((Expose(1, 7, DIGEST),))
    pair.join()

    assert reason in pair.wait(Refused).reason


def test_a_room_and_a_prompt_are_given_once(opened):
    pair = ends("tcp")
    opened.append(pair)
    pair.sender.begin((Expose(1, 7, DIGEST),))
    pair.join(digest=b"other")
    assert "prompt or adapter" in pair.wait(Refused).reason
    pair.receiver.begin((JoinRoom(1, HOST, pair.port, 7, DIGEST),))
    pair.receiver.begin((Receive(1, 0, (1,)),))
    pair.wait(PagesRequested)
    pair.sender.begin((SendPages(1, 0, (1,), last=True),))
    pair.wait(Received)

    pair.receiver.begin((JoinRoom(1, HOST, pair.port, 7, DIGEST),))

    assert "was used before" in pair.wait(Refused).reason


@pytest.mark.parametrize("kind", ["lost", "broken", "late", "swapped", "garbled"])
def test_faults_of_the_network_never_change_a_byte(opened, kind):
    """Each of many transfers arrives whole, or is said to have failed."""
    faults = Faults(seed=1, **{kind: 0.15})
    pair = ends("tcp", faults=faults)
    opened.append(pair)
    ended = 0
    for room in range(40):
        pair.sender.begin((Expose(room, room, DIGEST),))
        pair.receiver.begin((JoinRoom(room, HOST, pair.port, room, DIGEST),))
        pair.receiver.begin((Receive(room, 0, (1, 2), (PageSet(2, (1,)),)),))
    for _ in range(1000 if kind in ("lost", "swapped") else 60_000):
        for event in pair.sender.events() or ():
            if isinstance(event, PagesRequested):
                work = (
                    SendPages(event.job, 0, (3,), last=False),
                    SendPages(event.job, 1, (4,), last=True, page_sets=(PageSet(2, (2,)),)),
                )
                pair.sender.begin(work)
        for event in pair.receiver.events() or ():
            if isinstance(event, Received):
                assert content(pair.target[0], (1, 2)) == content(pair.source[0], (3, 4))
                assert content(pair.target[2], (1,)) == content(pair.source[2], (2,))
            ended += isinstance(event, Received | TransferFailed | Refused)
        if ended == 40:
            break
        time.sleep(0.001)
    if kind in ("lost", "swapped"):  # these wait for ever: the control half tells them to leave
        pair.receiver.begin(tuple(Leave(room) for room in range(40)))
        until(lambda: not pair.receiver._jobs)
    else:
        assert ended == 40


def test_pieces_join_neighbours_and_refuse_another_layout():
    ours = where([paged(8, 0)])[0]
    local, remote, sizes = pieces(ours, (1, 2, 5), ours, (3, 4, 2))
    assert sizes.tolist() == [192, 96] * 3
    assert (local - ours[0][0]).tolist()[:2] == [96, 480]
    assert (remote - ours[0][0]).tolist()[:2] == [288, 192]
    with pytest.raises(RemoteReadError, match="another layout"):
        pieces(ours, (1,), where([paged(8, 0, width=64)])[0], (1,))


def test_a_process_that_is_another_one_is_not_read():
    honest, lying = Attach(), Attach()
    lying._beacon = np.zeros(32, np.uint8)
    Attach().connect(honest.offer())
    forged = lying.offer()
    lying._beacon[:] = 1
    with pytest.raises(RemoteReadError, match="another one"):
        Attach().connect(forged)
    with pytest.raises(RemoteReadError, match="malformed"):
        Attach().connect(b"x")


SECRETS = (b"s" * 16, b"s" * 16)
GARBAGE = {
    "nothing": b"",
    "another protocol": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "noise": bytes(np.random.default_rng(0).integers(0, 256, 4096, np.uint8)),
    "half a head": b"SyKV\0\0",
    "a huge message": b"SyKV" + b"\xff" * 12,
    "a huge payload": b"SyKV\0\0\0\x04" + b"\x7f" * 8 + b"\x80" * 4,
    "no message": b"SyKV\0\0\0\x04" + b"\0" * 8 + b"\xc1\xc1\xc1\xc1",
    "another message": b"SyKV\0\0\0\x0c" + b"\0" * 8 + b"\x81\xa4type\xa4done!",
}


def said_by_server(port: int, data: bytes) -> bytes:
    """All that it says to a peer that says this and no more."""
    with socket.create_connection((HOST, port), timeout=60) as sock:
        sock.sendall(data)
        found = b""
        with contextlib.suppress(OSError):  # it did not read all, and may have closed by now
            sock.shutdown(socket.SHUT_WR)
            while part := sock.recv(1 << 16):
                found += part
        return found


def hand_over(pair: Ends, room: int) -> None:
    """A request that goes well."""
    pair.sender.begin((Expose(room, room, DIGEST), SendPages(room, 0, (3, 1), last=True)))
    pair.receiver.begin((JoinRoom(room, HOST, pair.port, room, DIGEST), Receive(room, 0, (2, 4))))
    assert pair.wait(Received).job == room
    assert content(pair.target[0], (2, 4)) == content(pair.source[0], (3, 1))


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_on_the_port_is_cut_off_and_hurts_no_other(opened, kind):
    pair = ends(secrets=SECRETS)
    opened.append(pair)
    said_by_server(pair.port, GARBAGE[kind])
    hand_over(pair, 7)


class Recorder:
    """Stands between the two, and keeps what the decode server says."""

    def __init__(self, port: int) -> None:
        self.said = b""
        self._server = socket.create_server((HOST, 0))
        self.port = self._server.getsockname()[1]
        self._thread = threading.Thread(target=self._run, args=(port,), daemon=True)
        self._thread.start()

    def _run(self, port: int) -> None:
        near, _ = self._server.accept()
        with near, socket.create_connection((HOST, port)) as far:
            back = threading.Thread(target=self._pass_on, args=(far, near), daemon=True)
            back.start()
            while part := near.recv(1 << 16):
                self.said += part
                far.sendall(part)
            far.shutdown(socket.SHUT_WR)
            back.join(60)

    @staticmethod
    def _pass_on(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while part := source.recv(1 << 16):
                target.sendall(part)

    def close(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()
        self._server.close()


def test_a_replayed_meeting_is_refused(opened):
    """It waits neither for its own room nor for another one."""
    pair = ends(secrets=SECRETS)
    opened.append(pair)
    recorder = Recorder(pair.port)
    direct, pair.port = pair.port, recorder.port
    hand_over(pair, 7)
    assert pair.wait(SendingEnded).error == ""
    recorder.close()
    pair.sender.begin((Expose(8, 8, DIGEST),))

    ask = recorder.said[: 16 + int.from_bytes(recorder.said[4:8])]
    assert b"does not know the secret" in said_by_server(direct, ask)

    pair.port = direct
    pair.sender.begin((SendPages(8, 0, (3, 1), last=True),))
    pair.receiver.begin((JoinRoom(8, HOST, direct, 8, DIGEST), Receive(8, 0, (2, 4))))
    assert pair.wait(Received).job == 8


def test_ranks_are_sent_on_to_their_counterparts(opened):
    first = ends(
        theirs=msgspec.structs.replace(manifest(), shards=(2, 1)),
        ours=msgspec.structs.replace(manifest(), shards=(2, 0)),
    )
    second = ends(ours=msgspec.structs.replace(manifest(), shards=(2, 1)))
    opened += [first, second]
    first.sender.rank_ports = second.sender.rank_ports = (first.port, second.port)
    second.sender.begin((Expose(7, 7, DIGEST), SendPages(7, 0, (3, 1), last=True)))
    first.receiver.begin((JoinRoom(1, HOST, first.port, 7, DIGEST), Receive(1, 0, (2, 4))))
    assert first.wait(Received).job == 1
    assert content(first.target[0], (2, 4)) == content(second.source[0], (3, 1))

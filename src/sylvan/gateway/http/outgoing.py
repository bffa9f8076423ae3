"""Turns a client's request into the request to a worker."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from sylvan.config.route import WorkersConfig
from sylvan.gateway.http.caller import Caller, HeaderPairs, end_to_end
from sylvan.gateway.observe.spans import TRACE_HEADERS
from sylvan.gateway.security.pages import PAGE_HEADERS, TrustedPages
from sylvan.gateway.upstream.http import Outgoing
from sylvan.gateway.workers.worker import Worker
from sylvan.protocol.journal import (
    JOURNAL_HEADER,
    KEY_HEADER,
    RESUME_HEADER,
    TICKET_HEADER,
    JournalTicket,
    ResumeFrom,
)

ROUTING_KEY = "x-smg-routing-key"
TARGET_WORKER = "x-smg-target-worker"
OWN_HEADERS = frozenset(
    {
        TICKET_HEADER,
        KEY_HEADER,
        RESUME_HEADER,
        JOURNAL_HEADER,
        ROUTING_KEY,
        TARGET_WORKER,
        "x-sylvan-event-ids",
        "last-event-id",
    }
)
"""Hop-by-hop headers between client and gateway, or gateway and worker."""
_REPLACED = ("host", "content-length", "expect", "x-request-id")
_CREDENTIALS = ("authorization", "x-api-key")


@dataclass(frozen=True, slots=True)
class Forwarding:
    """How requests are rewritten for workers.

    Attributes:
        config: Keys of the workers and of the gateway.
        keeps_credentials: Forward clients' keys, because the gateway has none of its own.
        pages: Web pages whose calls count as the gateway's.
    """

    config: WorkersConfig
    keeps_credentials: bool
    pages: TrustedPages

    def headers(self, caller: Caller) -> HeaderPairs:
        """Return the headers for every worker."""
        dropped = {*OWN_HEADERS, *_REPLACED}
        if not self.keeps_credentials:
            dropped.update(_CREDENTIALS)
        if self.pages.made(caller.headers):
            dropped.update(PAGE_HEADERS)
        trace = caller.span.headers()
        if trace is not None:
            dropped.update(TRACE_HEADERS)
        kept = [*end_to_end(caller.raw_headers, dropped), *(trace or ())]
        if caller.request_id:
            kept.append(("x-request-id", caller.request_id))
        return kept

    def for_worker(self, headers: HeaderPairs, worker: Worker) -> list[tuple[str, str]]:
        """Return the headers for one worker, with its own key if it has one."""
        key = worker.spec.api_key
        if key is None:
            return list(headers)
        kept = [pair for pair in headers if pair[0] not in _CREDENTIALS]
        return [*kept, ("authorization", f"Bearer {key}")]

    def gateway_headers(self) -> HeaderPairs:
        """Return the headers with which the gateway authenticates to a worker."""
        key = self.config.gateway_key
        return [] if key is None else [(KEY_HEADER, key.reveal())]


@dataclass(slots=True)
class AnswerJournal:
    """The relayed part of an answer, with which another worker can continue it.

    Attributes:
        ticket: Inputs of the answer besides the request (seed, IDs, time).
        max_bytes: Limit of the stored entries.
        entries: The entries of each frame that has some.
        num_frames: Frames relayed since the last entry, including its frame.
        num_bytes: Size of the entries.
        full: Entries were dropped because the limit was reached.
        begun: The client has received the head of the answer.
    """

    ticket: JournalTicket
    max_bytes: int
    entries: list[bytes] = field(default_factory=list[bytes])
    num_frames: int = 0
    num_bytes: int = 0
    full: bool = False
    begun: bool = False

    def add(self, entries: bytes) -> None:
        """Record a relayed frame."""
        if not entries:
            self.num_frames += 1
            return
        self.num_frames = 1
        self.num_bytes += len(entries)
        self.full = self.full or self.num_bytes > self.max_bytes
        if self.full:
            self.entries.clear()
        else:
            self.entries.append(entries)

    def resume(self) -> ResumeFrom | None:
        """Return where to continue; None if the client has at most the head."""
        return ResumeFrom(tuple(self.entries), self.num_frames) if self.num_frames else None


def new_ticket(caller: Caller, created: float) -> JournalTicket:
    """Make the ticket of a new request."""
    name = secrets.token_hex(16)
    seed = secrets.randbits(62)
    return JournalTicket(name=name, seed=seed, created=created, tenant=caller.tenant or None)


def with_ticket(
    request: Outgoing, ticket: JournalTicket, resume: ResumeFrom | None, gateway: HeaderPairs
) -> Outgoing:
    """Return the request for a worker that accepts tickets."""
    headers = [*request.headers, *gateway, (TICKET_HEADER, ticket.to_header())]
    body = request.body
    if resume is not None:
        blob = resume.encode()
        headers.append((RESUME_HEADER, str(len(blob))))
        body = blob + body
    return Outgoing(
        method=request.method,
        url=request.url,
        target=request.target,
        headers=headers,
        body=body,
    )

"""A client's request as workers get it."""

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
"""Headers between client and gateway, or gateway and worker; they go no further."""
_REPLACED = ("host", "content-length", "expect", "x-request-id")
_CREDENTIALS = ("authorization", "x-api-key")


@dataclass(frozen=True, slots=True)
class Forwarding:
    """How requests are changed on their way to workers.

    Attributes:
        config: Keys of workers and of the gateway.
        keeps_credentials: Clients' keys are passed on, since the gateway has none of its own.
        pages: Web pages that call as the gateway does.
    """

    config: WorkersConfig
    keeps_credentials: bool
    pages: TrustedPages

    def headers(self, caller: Caller) -> HeaderPairs:
        """What goes to every worker."""
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
        """What goes to one worker: with its own key, if it has one."""
        key = worker.spec.api_key
        if key is None:
            return list(headers)
        kept = [pair for pair in headers if pair[0] not in _CREDENTIALS]
        return [*kept, ("authorization", f"Bearer {key}")]

    def gateway_headers(self) -> HeaderPairs:
        """By which a worker knows the gateway."""
        key = self.config.gateway_key
        return [] if key is None else [(KEY_HEADER, key.reveal())]


@dataclass(slots=True)
class AnswerJournal:
    """What is known of an answer so far, such that another worker can go on with it.

    Attributes:
        ticket: What the answer is made from besides the request.
        max_bytes: Bound on the entries kept.
        entries: Of each frame that had any.
        num_frames: Frames passed on since the last entry, that one included.
        num_bytes: Of the entries.
        full: Entries are missing, because there were too many.
        begun: The client has seen the head of the answer.
    """

    ticket: JournalTicket
    max_bytes: int
    entries: list[bytes] = field(default_factory=list[bytes])
    num_frames: int = 0
    num_bytes: int = 0
    full: bool = False
    begun: bool = False

    def add(self, entries: bytes) -> None:
        """A frame was passed on."""
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
        """Where the client is; None if it has seen nothing but the head."""
        return ResumeFrom(tuple(self.entries), self.num_frames) if self.num_frames else None


def new_ticket(caller: Caller, created: float) -> JournalTicket:
    """A ticket for a request that has just come."""
    name = secrets.token_hex(16)
    seed = secrets.randbits(62)
    return JournalTicket(name=name, seed=seed, created=created, tenant=caller.tenant or None)


def with_ticket(
    request: Outgoing, ticket: JournalTicket, resume: ResumeFrom | None, gateway: HeaderPairs
) -> Outgoing:
    """The request as a worker gets it that takes tickets."""
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

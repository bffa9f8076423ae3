"""Sends one request to one worker, with a ticket if it accepts them, and relays the answer."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from sylvan.config.route import FailoverConfig
from sylvan.gateway.errors import UpstreamError
from sylvan.gateway.http.caller import Caller, HeaderPairs
from sylvan.gateway.http.outgoing import AnswerJournal, Forwarding, with_ticket
from sylvan.gateway.http.relay import AnswerReceiver
from sylvan.gateway.upstream.http import HttpUpstream, Incoming, Outgoing
from sylvan.gateway.workers.worker import Worker
from sylvan.protocol.journal import JOURNAL_HEADER, MEDIA_TYPE

_RANK_HEADER = "x-data-parallel-rank"


@dataclass(frozen=True, slots=True)
class RequestSender:
    """Sends requests to workers.

    Attributes:
        upstream: HTTP client.
        forwarding: How requests are rewritten.
        failover: When a worker counts as lost.
    """

    upstream: HttpUpstream
    forwarding: Forwarding
    failover: FailoverConfig

    def outgoing(
        self, caller: Caller, headers: HeaderPairs, worker: Worker, body: bytes
    ) -> Outgoing:
        """Return a client's request for one worker, without a ticket.

        Args:
            caller: The client.
            headers: Headers for every worker.
            worker: The worker.
            body: Body of the request.
        """
        sent = self.forwarding.for_worker(headers, worker)
        if worker.dp_rank is not None:
            if caller.headers.get("content-type", "").startswith("multipart/"):
                sent.append((_RANK_HEADER, str(worker.dp_rank)))
            else:
                body = spliced(body, b'"data_parallel_rank":%d' % worker.dp_rank)
        return Outgoing(
            method=caller.method,
            url=worker.spec.url,
            target=caller.path + (f"?{caller.query}" if caller.query else ""),
            headers=sent,
            body=body,
        )

    async def send(
        self,
        request: Outgoing,
        worker: Worker,
        journal: AnswerJournal,
        receiver: AnswerReceiver,
        elapsed_s: float,
    ) -> None:
        """Send a request, or the rest of one that another worker started.

        Args:
            request: The request without a ticket.
            worker: The worker.
            journal: How much of the answer the client has.
            receiver: Reads the answer.
            elapsed_s: Seconds that other workers spent on it.

        Raises:
            UpstreamError: The worker failed.
        """
        stall_s = None
        given = request
        if self.failover.enabled and worker.found.journals:
            stall_s = self.failover.stall_s
            ticket = msgspec.structs.replace(journal.ticket, elapsed_s=elapsed_s)
            known_by = self.forwarding.gateway_headers()
            given = with_ticket(request, ticket, journal.resume(), known_by)
        async with self.upstream.send(given, stall_s) as incoming:
            if incoming.header("content-type") == MEDIA_TYPE:
                await receiver.frames(incoming, journal, self.failover.stall_s)
                return
            if not _refuses_ticket(incoming):
                await receiver.plain(incoming)
                return
        worker.found.journals = False
        if journal.begun:
            raise UpstreamError("The worker does not accept tickets.", kind="protocol")
        await self.send(request, worker, journal, receiver, elapsed_s)


def _refuses_ticket(incoming: Incoming) -> bool:
    return incoming.status in (400, 403) and incoming.header(JOURNAL_HEADER) == "0"


def spliced(body: bytes, members: bytes) -> bytes:
    """Add members to a JSON object; they override its own."""
    end = body.rindex(b"}")
    is_empty = body[:end].rstrip().endswith(b"{")
    return body[:end] + (b"" if is_empty else b",") + members + body[end:]

"""Makes requests wait until their grammar is compiled; if that fails, only its requests fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import ClassVar

from sylvan.protocol.requests import GenerateRequest
from sylvan.runtime.core.req import Batch, Req, Slice
from sylvan.runtime.core.review import Review
from sylvan.runtime.features.grammar.api import CompiledGrammar
from sylvan.runtime.features.grammar.compiler.client import GrammarCompiler, Ticket
from sylvan.runtime.features.grammar.guard.guard import OutputGuard
from sylvan.runtime.features.grammar.spec import spec_of
from sylvan.runtime.features.grammar.work import (
    BannedTokens,
    GrammarData,
    GrammarWork,
    LoadedGrammar,
)
from sylvan.runtime.sched.capability import Capability, Verdict


class GrammarControl(Capability):
    """Requests grammars, and sends them to the worker half with the first step of a request."""

    name: ClassVar = "grammar"
    work_type: ClassVar = GrammarWork
    gates_running = False

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._ready: dict[str, LoadedGrammar | None] = {}  # of live requests; None: no grammar
        self._tickets: dict[str, Ticket] = {}
        self._starting: list[str] = []  # in the step being planned
        self._ended: list[str] = []  # not sent to the worker half yet
        self._sent: dict[str, str] = {}  # digests of requests known to the worker half
        self._uses = Counter[str]()  # number of requests by digest
        self._guards: dict[str, OutputGuard] = {}  # of live requests with a guard
        self._banned: dict[str, BannedTokens] = {}  # not sent to the worker half yet
        self.tries = 0  # number of rollbacks
        self.taken_back = 0  # in tokens

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a grammar."""
        return len(self._tickets)

    def counts(self) -> Mapping[str, int]:
        """Return the fields of `SchedulerLoad`."""
        return {
            "num_grammar_reqs": self.num_waiting,
            "grammar_tries": self.tries,
            "grammar_taken_back": self.taken_back,
        }

    def loaded(self, digest: str) -> CompiledGrammar | None:
        """Return the grammar with that digest if a live request has it and it is loaded here."""
        held = (found for found in tuple(self._ready.values()) if found is not None)
        return next((found.grammar for found in held if found.data.digest == digest), None)

    def gate(self, req: Req) -> Verdict:
        """See `Capability.gate`.

        Raises:
            RequestError: Its grammar cannot be compiled; the message is the library's.
        """
        rid = req.rid
        if rid in self._ready:
            return Verdict.READY
        ticket = self._tickets.get(rid)
        if ticket is None:
            spec = spec_of(req.request)
            if spec is None:
                self._ready[rid] = None
                return Verdict.READY
            ticket = self._tickets[rid] = self._compiler.request(spec)
        if not ticket.done:
            return Verdict.WAIT
        if ticket.error is not None:
            raise ticket.error
        assert ticket.grammar is not None
        self._ready[rid] = ticket.grammar
        self._drop_ticket(rid)
        return Verdict.READY

    def reviews(self, req: Req) -> bool:
        """Review the output against the part of the schema that the grammar does not enforce."""
        found = self._ready.get(req.rid)
        return found is not None and found.guard is not None

    def review(self, req: Req, count: int, *, complete: bool) -> Review:
        rid, length = req.rid, req.tokens.length
        guard = self._guards.get(rid)
        if guard is None:
            found = self._ready[rid]
            assert found is not None
            assert found.guard is not None
            assert isinstance(req.request, GenerateRequest)
            guard = self._guards[rid] = OutputGuard(found.guard, req.request)
        review = guard.review(req.tokens.view(length - count, length).tolist(), complete=complete)
        if review.kept < length:
            self.taken_back += length - review.kept
            self.tries += 1
            self._banned[rid] = BannedTokens(review.kept, guard.banned_next)
            self.active = True
        return review

    def on_start(self, piece: Slice) -> None:
        rid = piece.req.rid
        known = rid in self._sent and rid not in self._ended  # it was preempted
        if self._ready.get(rid) is not None and not known:
            self._starting.append(rid)
            self.active = True

    def plan_work(self, batch: Batch) -> GrammarWork | None:
        self.active = False
        if not (self._starting or self._ended or self._banned):
            return None
        for rid in self._ended:
            digest = self._sent.pop(rid)
            self._uses[digest] -= 1
            if not self._uses[digest]:
                del self._uses[digest]
        grammars: list[GrammarData] = []
        requests: dict[str, str] = {}
        for rid in self._starting:
            found = self._ready[rid]
            assert found is not None
            digest = requests[rid] = self._sent[rid] = found.data.digest
            if digest not in self._uses:
                grammars.append(found.data)
            self._uses[digest] += 1
        ended, self._ended, self._starting = tuple(self._ended), [], []
        banned, self._banned = self._banned, {}
        return GrammarWork(ended, tuple(grammars), requests, banned)

    def on_finish(self, req: Req) -> None:
        rid = req.rid
        self._ready.pop(rid, None)
        self._drop_ticket(rid)
        self._guards.pop(rid, None)
        self._banned.pop(rid, None)
        if rid in self._sent:
            self._ended.append(rid)
            self.active = True

    def _drop_ticket(self, rid: str) -> None:
        if ticket := self._tickets.pop(rid, None):
            self._compiler.forget(ticket)

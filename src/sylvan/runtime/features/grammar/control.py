"""Requests wait until their grammar is compiled; one that cannot be compiled fails alone."""

from __future__ import annotations

from sylvan.runtime.core.req import Req
from sylvan.runtime.features.grammar.api import CompiledGrammar
from sylvan.runtime.features.grammar.compiler.client import GrammarCompiler, Ticket
from sylvan.runtime.features.grammar.spec import spec_of
from sylvan.runtime.sched.capability import Capability, Verdict


class GrammarControl(Capability):
    """Asks for grammars, and hands them to the matchers beside the sampler by rid."""

    gates_running = False

    def __init__(self, compiler: GrammarCompiler, grammars: dict[str, CompiledGrammar]) -> None:
        self._compiler = compiler
        self._grammars = grammars  # shared with the data half, which only reads
        self._ready: set[str] = set()
        self._tickets: dict[str, Ticket] = {}

    @property
    def num_waiting(self) -> int:
        """Requests whose grammar is being compiled."""
        return len(self._tickets)

    def gate(self, req: Req) -> Verdict:
        """See `Capability.gate`.

        Raises:
            RequestError: its grammar cannot be compiled; the library's reason.
        """
        rid = req.rid
        if rid in self._ready:
            return Verdict.READY
        ticket = self._tickets.get(rid)
        if ticket is None:
            spec = spec_of(req.request)
            if spec is None:
                self._ready.add(rid)
                return Verdict.READY
            ticket = self._tickets[rid] = self._compiler.request(spec)
        if not ticket.done:
            return Verdict.WAIT
        if ticket.error is not None:
            raise ticket.error
        assert ticket.grammar is not None
        self._grammars[rid] = ticket.grammar
        self._drop_ticket(rid)
        self._ready.add(rid)
        return Verdict.READY

    def on_finish(self, req: Req) -> None:
        """See `Capability.on_finish`."""
        self._ready.discard(req.rid)
        self._grammars.pop(req.rid, None)
        self._drop_ticket(req.rid)

    def _drop_ticket(self, rid: str) -> None:
        if ticket := self._tickets.pop(rid, None):
            self._compiler.forget(ticket)

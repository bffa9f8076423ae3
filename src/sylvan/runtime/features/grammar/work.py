"""Messages from the control half of grammars to the worker half: data only."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from sylvan.runtime.features.grammar.api import CompiledGrammar
from sylvan.runtime.features.grammar.guard.guard import GuardedGrammar


class GrammarData(msgspec.Struct, frozen=True):
    """A serialised grammar, which `library`'s `GrammarLoader.load` takes.

    `digest` is the hash of its content (`GrammarSpec.digest`).
    """

    digest: str
    library: str
    data: bytes


class CompileResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of compiling a grammar.

    Attributes:
        id: ID of the order.
        library: Library whose loader takes `data`.
        data: Input of `GrammarLoader.load`.
        reason: Error; empty on success.
        memory_bytes: Memory used.
        seconds: CPU time used.
        timed_out: The error is a timeout.
        lost: Keywords that the grammar does not enforce everywhere, by the place of their schema
            (`guard.relax.Unenforced`).
    """

    id: int
    library: str = ""
    data: bytes = b""
    reason: str = ""
    memory_bytes: int = 0
    seconds: float = 0.0
    timed_out: bool = False
    lost: dict[str, tuple[str, ...]] = {}


class BannedTokens(msgspec.Struct, frozen=True):
    """Tokens banned at a position."""

    position: int
    token_ids: tuple[int, ...]


class GrammarWork(msgspec.Struct, frozen=True):
    """Changes to the requests with a grammar; `ended` is applied first.

    A grammar is kept as long as a request uses it.

    Attributes:
        ended: Requests that no longer need their grammar.
        grammars: New grammars.
        requests: The digest of each starting request's grammar, by request ID.
        banned: Tokens banned next in an output that rolls back, by request ID.
    """

    ended: tuple[str, ...] = ()
    grammars: tuple[GrammarData, ...] = ()
    requests: dict[str, str] = {}
    banned: dict[str, BannedTokens] = {}


@dataclass(frozen=True, slots=True)
class LoadedGrammar:
    """A grammar loaded in this process, and its serialised form.

    `guard` enforces what the grammar does not; None: it enforces the whole schema.
    """

    grammar: CompiledGrammar
    data: GrammarData
    guard: GuardedGrammar | None = None

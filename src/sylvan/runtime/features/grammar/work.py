"""What the control half of grammars tells the worker half: data only."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from sylvan.runtime.features.grammar.api import CompiledGrammar
from sylvan.runtime.features.grammar.guard.guard import GuardedGrammar


class GrammarData(msgspec.Struct, frozen=True):
    """A compiled grammar as `GrammarLoader.load` of `library` takes it.

    `digest` names its content (`GrammarSpec.digest`).
    """

    digest: str
    library: str
    data: bytes


class CompileResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of compiling a grammar.

    Attributes:
        id: Of the order.
        library: Whose loader takes `data`.
        data: What `GrammarLoader.load` takes.
        reason: Why it cannot be compiled; empty if it was.
        memory_bytes: That compiling took.
        seconds: That it took.
        timed_out: The reason is that it took longer than it may.
        lost: Keywords that the grammar does not hold everywhere, by the place of their schema
            (`guard.relax.Lost`).
    """

    id: int
    library: str = ""
    data: bytes = b""
    reason: str = ""
    memory_bytes: int = 0
    seconds: float = 0.0
    timed_out: bool = False
    lost: dict[str, tuple[str, ...]] = {}


class Bars(msgspec.Struct, frozen=True):
    """Tokens that must not come at a position."""

    position: int
    token_ids: tuple[int, ...]


class GrammarWork(msgspec.Struct, frozen=True):
    """Changes of the requests with a grammar; `ended` come first.

    A grammar is known as long as any request has it.

    Attributes:
        ended: Requests that need theirs no more.
        grammars: Those that are not known yet.
        requests: The digest of the grammar of each request that starts, by rid.
        bars: Tokens that must not come next in an output that goes back, by rid.
    """

    ended: tuple[str, ...] = ()
    grammars: tuple[GrammarData, ...] = ()
    requests: dict[str, str] = {}
    bars: dict[str, Bars] = {}


@dataclass(frozen=True, slots=True)
class LoadedGrammar:
    """A compiled grammar that this process can use, and as it is sent to others.

    `guard` holds what the grammar does not; None: it holds all of its schema.
    """

    grammar: CompiledGrammar
    data: GrammarData
    guard: GuardedGrammar | None = None

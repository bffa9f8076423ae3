"""Types of the control plane: a request, and one step's work, as the scheduler sees them."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

import numpy as np

from sylvan.protocol.arrays import EMPTY_IDS, IntArray
from sylvan.protocol.messages import DraftCounts, Finish
from sylvan.protocol.requests import EmbedRequest, GenerateRequest
from sylvan.runtime.cache.types import CacheKey, KVHandle
from sylvan.runtime.core.review import ReviewState
from sylvan.runtime.core.step import PageCopy, chain

NEVER = sys.maxsize
"""A number of tokens that no request reaches."""


class TokenBuffer:
    """Token ids of one request in one growing array, so that prefixes are views, not copies."""

    __slots__ = ("_cells", "_ids", "_room", "last", "length")

    def __init__(self, ids: IntArray, room: int) -> None:
        # read only; attributes because they are read at every step
        self.length = len(ids)
        self.last = int(ids[-1]) if len(ids) else -1
        self._room = len(ids) + room
        self._ids = np.empty(self._room, np.int32)
        self._ids[: len(ids)] = ids
        self._cells = self._ids.data  # a memoryview writes one number in half the time

    def __len__(self) -> int:
        return self.length

    def append(self, token: int) -> None:
        """Add one id."""
        if self.length == self._room:
            self._ids = np.concatenate([self._ids, np.empty(max(64, self._room), np.int32)])
            self._room = len(self._ids)
            self._cells = self._ids.data
        self._cells[self.length] = self.last = token
        self.length += 1

    def repeat(self, token: int, count: int) -> None:
        """Add one id many times."""
        if count < 1:
            return
        stop = self.length + count
        if stop > self._room:
            self._ids = np.concatenate([self._ids, np.empty(max(64, count), np.int32)])
            self._room, self._cells = len(self._ids), self._ids.data
        self._ids[self.length : stop] = token
        self.length, self.last = stop, token

    def view(self, start: int, stop: int) -> IntArray:
        """Ids [start, stop) without copying; valid until the next `append`."""
        assert stop <= self.length
        return self._ids[start:stop]

    def truncate(self, length: int) -> None:
        """Drop all ids from `length` on."""
        if length < self.length:
            self.length = length
            self.last = int(self._ids[length - 1]) if length else -1


class Phase(Enum):
    """Phase of a request; see `sched.phases` for the allowed transitions.

    WAITING has no memory. LOADING owns memory that a load is filling. RUNNING takes part in steps.
    CLOSING has ended, but the detokenizer may still find an earlier stop string. HELD has ended,
    and a capability still needs its memory. ENDED owns nothing.
    """

    WAITING = auto()
    LOADING = auto()
    RUNNING = auto()
    CLOSING = auto()
    HELD = auto()
    ENDED = auto()


@dataclass(slots=True, eq=False)
class Req:
    """A request as the scheduler sees it.

    There is no prefill or decode state. Each step computes some of the tokens that lack KV;
    computing the last one samples the next. Decoding is when exactly one is lacking.
    """

    request: GenerateRequest | EmbedRequest  # immutable; features read their fields here
    arrived_s: float = 0.0
    order: int = 0  # arrival number; unique
    rid: str = field(init=False)  # unique among those alive
    tokens: TokenBuffer = field(init=False)  # prompt, then outputs
    prompt_len: int = field(init=False)  # tokens given by the client
    max_tokens: int = field(init=False)  # prompt and outputs together
    min_tokens: int = field(init=False)  # no stop id ends it before
    stop_ids: frozenset[int] = field(init=False)
    priority: int = field(init=False)
    ignores_eos: bool = False
    generates: bool = False
    phase: Phase = Phase.WAITING
    computed: int = 0  # tokens whose KV exists once all steps in flight have completed
    pending: int = 0  # tokens being sampled by steps in flight; their ids are not known here yet
    kv: KVHandle | None = None
    decode: Slice | None = None  # owned by the planner: the slice of plain decoding steps, reused
    slot: int = -1  # owned by the plan builder: request slot in the executor; -1: none
    key: CacheKey | None = None  # key at the last cache lookup
    cached_tokens: int = 0  # prompt tokens found in the prefix cache at the first start
    loaded_tokens: int = 0  # of these, tokens loaded from a store
    host_tokens: int = 0  # of these, tokens loaded from host memory
    retractions: int = 0
    drafts: DraftCounts | None = None
    review: ReviewState | None = None  # set if tokens are reviewed before the client gets them
    # number of `tokens` that the client has
    num_emitted: int = field(init=False)
    emit_at: int = field(init=False)  # number of tokens at which the next output is emitted
    emit_interval: int = 1  # tokens between outputs after that
    may_load: bool = True  # False once a load failed or took too long
    loading_since_s: float = 0.0
    started_s: float = 0.0
    first_token_s: float = 0.0
    finish: Finish | None = None

    def __post_init__(self) -> None:
        request, ids = self.request, self.request.input_ids
        self.rid = request.rid
        self.prompt_len = self.max_tokens = self.min_tokens = len(ids)
        self.stop_ids = frozenset()
        self.priority = request.priority
        room = 0
        if isinstance(request, GenerateRequest):
            sampling = request.sampling
            self.max_tokens += sampling.max_new_tokens or 0
            self.min_tokens += sampling.min_new_tokens
            self.ignores_eos = sampling.ignore_eos
            self.generates = True
            if not sampling.ignore_eos:
                self.stop_ids = frozenset((*request.eos_ids, *sampling.stop_token_ids))
            ids = np.concatenate([ids, request.output_ids])
            room = min(sampling.max_new_tokens or 0, 4096)
            # stop strings need every token at once, and logprobs are not buffered
            if not (sampling.stop or sampling.stop_regex or request.logprobs):
                self.emit_interval = request.interval or NEVER
        self.tokens = TokenBuffer(ids, room)
        self.num_emitted, self.emit_at = len(ids), len(ids) + 1

    @property
    def num_tokens(self) -> int:
        """Known tokens plus those in flight."""
        return self.tokens.length + self.pending

    @property
    def num_outputs(self) -> int:
        """Generated tokens known here, replayed ones included."""
        return self.tokens.length - self.prompt_len

    @property
    def lacking(self) -> int:
        """Tokens without KV that are not being computed either."""
        return self.tokens.length + self.pending - self.computed


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed next tokens of a request, as a tree.

    `parents[i]` is the index in `tokens` of the parent of token i, or -1 if that is the last known
    token. A chain is (-1, 0, 1, ...).
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    @property
    def is_chain(self) -> bool:
        """Whether each draft token follows the one before it."""
        return self.parents == chain(len(self.parents))

    @property
    def paths(self) -> int:
        """Draft tokens that nothing follows."""
        return len(self.parents) - len({parent for parent in self.parents if parent >= 0})

    @property
    def rows(self) -> int:
        """Number of rows if each path of a tree is computed as a separate sequence.

        Every path but the first repeats the last known token.
        """
        if self.is_chain:
            return len(self.tokens)
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        inner = set(self.parents)
        return sum(depth + 1 for i, depth in enumerate(depths) if i not in inner) - 1


@dataclass(slots=True, eq=False)  # not frozen: a frozen constructor takes three times as long
class Slice:
    """Compute tokens [start, stop) of `req` in this step.

    `samples`: it reaches the last token, so it samples the next. If the last token is itself in
    flight (`stop - 1 >= len(req.tokens)`), the executor feeds the id it sampled.
    `draft` holds draft tokens to verify in the same pass. `whole` slices are never chunked
    (bidirectional encoders).
    """

    req: Req
    start: int
    stop: int
    samples: bool
    draft: Draft | None = None
    whole: bool = False


class Growth(NamedTuple):
    """Requests that got one new page in each KV group, and the pages of the first group."""

    reqs: tuple[Req, ...] = ()
    pages: IntArray = EMPTY_IDS


NO_GROWTH = Growth()


@dataclass(slots=True, eq=False)  # not frozen, as `Slice`
class Batch:
    """One step's work as the scheduler sees it; `core.step.StepPlan` is sent to the executor.

    `copies` are done before the forward pass. `ended` names requests whose slots are free.
    `num_decodes`: the number of leading slices that are plain decodes (one input token, one
    sample). `growth`: pages that the plain decodes got in this step; None if unknown.
    """

    slices: tuple[Slice, ...]
    copies: tuple[PageCopy, ...] = ()
    ended: tuple[str, ...] = ()
    num_decodes: int = 0
    growth: Growth | None = None

    @property
    def decodes(self) -> bool:
        """Whether all slices are plain decodes, as in nearly all steps."""
        return self.num_decodes == len(self.slices)

    @property
    def num_tokens(self) -> int:
        """Tokens computed by this step, draft tokens excluded."""
        return sum(s.stop - s.start for s in self.slices)

"""Matchers used by the sampler: masks before a token is sampled, the next state right after."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from sylvan.protocol.arrays import IntArray
from sylvan.protocol.requests import GenerateRequest
from sylvan.runtime.features.grammar.api import CompiledGrammar
from sylvan.runtime.features.grammar.forced import Jumper
from sylvan.runtime.features.grammar.masks import MaskRows
from sylvan.runtime.features.grammar.output import BY_GRAMMAR, UNCONSTRAINED, Output
from sylvan.runtime.features.grammar.overlap import Overlap
from sylvan.runtime.features.grammar.spec import spec_of
from sylvan.runtime.features.grammar.thinking import ThoughtTracker
from sylvan.runtime.features.grammar.vocabulary import Encode, Vocabulary
from sylvan.runtime.sampling.constraints import Masks, RowOutcome
from sylvan.runtime.sampling.params import SamplingBatch

_VOID = RowOutcome()


class Matchers:
    """See `Constraints`. One per executor; `GrammarWorker` fills `grammars`, by request ID.

    Forced text is emitted in the tokenizer's own tokens, which are known as soon as the text is:
    with `jumps` they are emitted at once, otherwise one per step, and no mask is
    computed for them.
    """

    def __init__(
        self,
        grammars: Mapping[str, CompiledGrammar | str],
        vocabulary: Callable[[], Vocabulary],
        vocab_size: int,
        *,
        jumps: bool,
        free_core: bool = False,
    ) -> None:
        """Create matchers. A string in `grammars` is the error of a grammar.

        `vocabulary` is called with the first grammar request; `jumps`: see `forced`.
        `free_core`: whether a core is idle during the forward pass.
        """
        self._grammars = grammars
        self._vocabulary_of = vocabulary
        self._jumps = jumps
        self._jumper: Jumper | None = None
        self._eos_ids: tuple[int, ...] = ()
        self._tokens: Sequence[bytes] = ()
        self._encode: Encode | None = None
        self._outputs: dict[int, Output] = {}  # by slot
        self._banned: dict[str, tuple[int, tuple[int, ...]]] = {}  # by request ID
        self._thread: ThreadPoolExecutor | None = None
        self._filling: Future[None] | None = None
        self._bits = MaskRows(vocab_size)
        self._overlap = Overlap(free_core=free_core)
        self._prepared_s = 0.0  # when the forward pass could start; 0: already measured
        self._slots: IntArray = np.zeros(0, np.int32)  # of the prepared rows
        self._rows: list[int] = []  # masked rows, ascending
        self.certain_tokens = 0  # known without asking the model

    @property
    def idle(self) -> bool:
        return not self._outputs

    @property
    def ready(self) -> bool:
        return self._filling is None or self._filling.done()

    def ban(self, rid: str, position: int, token_ids: tuple[int, ...]) -> None:
        """Forbid these IDs at that position, in the output of a request that joins again."""
        self._banned[rid] = position, token_ids

    def forget_banned(self, rid: str) -> None:
        """Drop a finished request."""
        self._banned.pop(rid, None)

    def join(self, slot: int, request: GenerateRequest, outputs: IntArray) -> None:
        self._outputs.pop(slot, None)
        is_constrained = spec_of(request) is not None
        if is_constrained:
            self._load_vocabulary()
        thinking = _tracker(request, self._tokens if is_constrained else None)
        if not is_constrained and thinking is None:
            return
        found = self._grammars.get(request.rid, "the grammar of this request is gone")
        grammar = None if isinstance(found, str) else found
        output = Output(
            matcher=grammar.matcher() if grammar else None,
            position=len(request.input_ids),
            limit=len(request.input_ids) + (request.sampling.max_new_tokens or 0),
            end_ids=tuple(dict.fromkeys((*request.eos_ids, *request.sampling.stop_token_ids))),
            thinking=thinking,
            # a token without a forward pass has no log probabilities
            jumps=self._jumps and request.logprobs is None,
        )
        if isinstance(found, str) and is_constrained:
            output.error = found
        self._find_forced(output)
        for token in outputs.tolist():
            if output.follow(token):
                self._find_forced(output)
        if request.rid in self._banned:
            output.ban(*self._banned[request.rid])
        self._outputs[slot] = output

    def leave(self, slot: int) -> None:
        self._outputs.pop(slot, None)

    def constrains(self, slot: int) -> bool:
        return slot in self._outputs

    def prepare(self, slots: IntArray, positions: NDArray[np.int64]) -> bool:
        self._wait()
        self._slots, self._rows = slots, []
        outputs = self._outputs
        if not outputs:
            return False
        todo: list[Output] = []
        choices: list[int] = []
        rows = zip(slots.tolist(), positions.tolist(), strict=True)
        for row, (slot, position) in enumerate(rows):
            output = outputs.get(slot)
            if output is None or position < output.position:
                continue
            choice = output.choice
            if choice != UNCONSTRAINED:
                self._rows.append(row)
                todo.append(output)
                choices.append(choice)
        if not todo:
            return False
        self._bits.first(len(todo))
        self._begin(todo, choices)
        self._prepared_s = time.perf_counter()
        return True

    def masks(self, batch: SamplingBatch) -> Masks | None:
        if self._filling is not None:
            self._record_pass()
        self._wait()
        if not self._rows:
            return None
        bits, rows = self._bits.first(len(self._rows)), self._rows
        if np.array_equal(batch.slots, self._slots):
            return Masks(np.array(rows, np.int32), bits)
        index_of = {int(self._slots[row]): i for i, row in enumerate(rows)}
        slots = enumerate(batch.slots.tolist())
        found = [(row, index_of[slot]) for row, slot in slots if slot in index_of]
        if not found:
            return None
        own, sources = np.array(found, np.int32).T
        return Masks(own, bits[sources])

    def advance(self, batch: SamplingBatch, token_ids: IntArray) -> dict[int, RowOutcome]:
        self._record_pass()
        outcomes: dict[int, RowOutcome] = {}
        if not self._outputs:
            return outcomes
        decided = zip(
            batch.slots.tolist(), batch.positions.tolist(), token_ids.tolist(), strict=True
        )
        for row, (slot, position, token) in enumerate(decided):
            output = self._outputs.get(slot)
            if output is None:
                continue
            if position < output.position:
                outcomes[row] = _VOID
            elif (outcome := self._decide(output, token)) is not None:
                outcomes[row] = outcome
        return outcomes

    def close(self) -> None:
        """Stop the thread."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
            self._thread = None

    # ---- one output

    def _decide(self, output: Output, token: int) -> RowOutcome | None:
        """Decide the token of `output`; None: use `token`."""
        if output.error:
            return RowOutcome(error=output.error)
        if output.is_decided:  # known from the start
            return RowOutcome(self._emit_forced(output), ended=output.finished)
        if token in output.end_ids and output.may_end:
            output.position += 1
            return RowOutcome((token,), ended=True)
        if output.follow(token):
            self._find_forced(output)
            if output.error:
                return RowOutcome(error=output.error)
        more = self._emit_forced(output) if output.forced_ids and output.is_decided else ()
        ended = output.finished and not output.forced_ids
        return RowOutcome((token, *more), ended=ended) if ended or more else None

    def _emit_forced(self, output: Output) -> tuple[int, ...]:
        """Emit the forced tokens at once."""
        forced_ids, output.forced_ids = output.forced_ids, ()
        output.position += len(forced_ids)
        return forced_ids

    def _find_forced(self, output: Output) -> None:
        """Find forced tokens now, unless they are known or it is too late.

        Once is enough: what is undetermined now depends on the next sampled token.
        """
        matcher, thinking = output.matcher, output.thinking
        if (
            output.forced_ids
            or output.finished
            or output.error
            or output.rejected
            or matcher is None
        ):
            return
        if output.is_thinking:
            return
        if thinking is not None and thinking.rest:
            self._begin_with(output, thinking.rest)
            thinking.rest = b""
        if output.position >= output.limit or output.error:
            return
        assert self._jumper is not None
        output.forced_ids = self._jumper.advance(matcher)
        self.certain_tokens += len(output.forced_ids)
        output.finished = matcher.is_terminated()

    def _begin_with(self, output: Output, text: bytes) -> None:
        """Start the answer inside the token that ended the thinking."""
        assert output.matcher is not None
        assert self._encode is not None
        ids = self._encode(text)
        num_accepted = output.matcher.accept_all(ids)
        output.num_accepted += num_accepted
        if num_accepted < len(ids):
            output.error = (
                f"the answer begins with {text.decode('utf-8', 'replace')!r}, in the same token as"
                " the end of the thinking, and the grammar does not allow that"
            )

    def _load_vocabulary(self) -> None:
        if self._jumper is None:
            vocabulary = self._vocabulary_of()
            self._eos_ids, self._tokens = vocabulary.eos_ids, vocabulary.tokens
            self._encode = vocabulary.encode
            self._jumper = Jumper(vocabulary)

    # ---- masks

    def _begin(self, todo: list[Output], choices: list[int]) -> None:
        """Fill masks, or start filling them concurrently with the forward pass."""
        asked = choices.count(BY_GRAMMAR)
        if self._overlap.beside(asked):
            self._thread = self._thread or ThreadPoolExecutor(1, "sylvan-masks")
            self._filling = self._thread.submit(self._bits.fill, todo, choices, self._eos_ids)
            return
        begun_s = time.perf_counter()
        self._bits.fill(todo, choices, self._eos_ids)
        if asked:
            self._overlap.filled(asked, time.perf_counter() - begun_s)

    def _record_pass(self) -> None:
        """Record the end of the forward pass."""
        if self._prepared_s:
            self._overlap.passed(time.perf_counter() - self._prepared_s)
            self._prepared_s = 0.0

    def _wait(self) -> None:
        if self._filling is not None:
            self._filling.result()
            self._filling = None


def _tracker(request: GenerateRequest, tokens: Sequence[bytes] | None) -> ThoughtTracker | None:
    """Track the thinking of a request; None if nothing depends on it.

    `tokens`: bytes by ID, for a request with a grammar.
    """
    thinking = request.thinking
    if thinking is None or (tokens is None and thinking.budget is None):
        return None
    return ThoughtTracker(thinking, tokens or ())

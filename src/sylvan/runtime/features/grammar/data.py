"""Matchers beside the sampler: masks before a token is drawn, the next state right after."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sylvan.protocol.arrays import IntArray
from sylvan.protocol.requests import GenerateRequest
from sylvan.runtime.features.grammar.api import CompiledGrammar, GrammarMatcher
from sylvan.runtime.features.grammar.forced import Jumper
from sylvan.runtime.features.grammar.spec import spec_of
from sylvan.runtime.features.grammar.thinking import ThoughtTracker
from sylvan.runtime.features.grammar.vocabulary import Vocabulary
from sylvan.runtime.sampling.constraints import Masks, Outcome
from sylvan.runtime.sampling.params import SamplingBatch

logger = logging.getLogger(__name__)

_VOID = Outcome()


@dataclass(slots=True)
class _Output:
    """One output on its way through its grammar.

    `position` is that of the next token to be decided; steps in flight that sample an earlier one
    are void. `pending` are tokens before it that are certain and not given out yet.
    """

    matcher: GrammarMatcher | None
    position: int
    ends: tuple[int, ...]  # ids that end it, where the grammar accepts
    thinking: ThoughtTracker | None = None  # until it is over, no grammar constrains
    jumps: bool = False
    pending: tuple[int, ...] = ()
    over: bool = False  # nothing can follow, `pending` apart
    error: str = ""


class Matchers:
    """See `Constraints`. One for each executor; `grammars` is filled by the control half."""

    def __init__(
        self,
        grammars: Mapping[str, CompiledGrammar],
        vocabulary: Callable[[], Vocabulary],
        vocab_size: int,
        *,
        jumps: bool,
    ) -> None:
        """`vocabulary` is called with the first request with a grammar; `jumps`: see `forced`."""
        self._grammars = grammars
        self._vocabulary_of = vocabulary
        self._words = -(-vocab_size // 32)
        self._jumps = jumps
        self._vocabulary: Vocabulary | None = None
        self._jumper: Jumper | None = None
        self._outputs: dict[int, _Output] = {}  # by slot
        self._thread: ThreadPoolExecutor | None = None
        self._filling: Future[None] | None = None
        self._bits: IntArray = np.zeros((0, 0), np.int32)
        self._row_of: dict[int, int] = {}  # slot -> row of `_bits`
        self.certain_tokens = 0  # appended without asking the model

    @property
    def idle(self) -> bool:
        """See `Constraints.idle`."""
        return not self._outputs

    def join(self, slot: int, request: GenerateRequest, outputs: IntArray) -> None:
        """See `Constraints.join`."""
        self._outputs.pop(slot, None)
        is_constrained = spec_of(request) is not None
        thinking = _tracker(request, is_constrained=is_constrained)
        if not is_constrained and thinking is None:
            return
        if self._vocabulary is None and is_constrained:
            self._vocabulary = self._vocabulary_of()
            self._jumper = Jumper(self._vocabulary) if self._jumps else None
        grammar = self._grammars.get(request.rid)
        output = _Output(
            matcher=grammar.matcher() if grammar else None,
            position=len(request.input_ids),
            ends=tuple(dict.fromkeys((*request.eos_ids, *request.sampling.stop_token_ids))),
            thinking=thinking,
            # a token without a forward pass has no log probabilities
            jumps=self._jumper is not None and request.logprobs is None,
        )
        if grammar is None and is_constrained:  # it ended before its first step began
            output.error = "the grammar of this request is gone"
        for token in outputs.tolist():
            self._follow(output, token)
        output.pending = self._jump(output)
        output.over = _is_over(output)
        self._outputs[slot] = output

    def leave(self, slot: int) -> None:
        """See `Constraints.leave`."""
        self._outputs.pop(slot, None)

    def bound(self, slot: int) -> bool:
        """See `Constraints.bound`."""
        return slot in self._outputs

    def prepare(self, slots: IntArray, positions: NDArray[np.int64]) -> bool:
        """See `Constraints.prepare`."""
        self._row_of.clear()
        todo: list[_Output] = []
        if not self._outputs:
            return False
        for slot, position in zip(slots.tolist(), positions.tolist(), strict=True):
            output = self._outputs.get(slot)
            if output is not None and position >= output.position and _is_masked(output):
                self._row_of[slot] = len(todo)
                todo.append(output)
        if not todo:
            return False
        if len(todo) > len(self._bits):
            self._bits = np.zeros((2 * len(todo), self._words), np.int32)
        self._thread = self._thread or ThreadPoolExecutor(1, "sylvan-masks")
        self._filling = self._thread.submit(self._fill, todo)
        return True

    def masks(self, batch: SamplingBatch) -> Masks | None:
        """See `Constraints.masks`."""
        if self._filling is not None:
            self._filling.result()
            self._filling = None
        if not self._row_of:
            return None
        found = [
            (row, self._row_of[slot])
            for row, slot in enumerate(batch.slots.tolist())
            if slot in self._row_of
        ]
        if not found:
            return None
        rows, sources = np.array(found, np.int32).T
        return Masks(rows, self._bits[sources])

    def advance(self, batch: SamplingBatch, token_ids: IntArray) -> dict[int, Outcome]:
        """See `Constraints.advance`."""
        if not self._outputs:
            return {}
        outcomes: dict[int, Outcome] = {}
        positions = batch.positions.tolist()
        for row, (slot, token) in enumerate(
            zip(batch.slots.tolist(), token_ids.tolist(), strict=True)
        ):
            output = self._outputs.get(slot)
            if output is None:
                continue
            if positions[row] < output.position - len(output.pending):
                outcomes[row] = _VOID
            elif (outcome := self._decide(output, token)) is not None:
                outcomes[row] = outcome
        return outcomes

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
            self._thread = None

    # ---- one output

    def _decide(self, output: _Output, token: int) -> Outcome | None:
        """What the row of `output` comes to; None: just `token`."""
        if output.error:
            return Outcome(error=output.error)
        if output.pending or output.over:
            tokens, output.pending = output.pending, ()
            return Outcome(tokens, ended=output.over)
        if _may_end(output) and token in output.ends:
            output.position += 1
            return Outcome((token,), ended=True)
        self._follow(output, token)
        if output.error:
            return Outcome(error=output.error)
        tokens = (token, *self._jump(output))
        output.over = _is_over(output)
        more = output.over or len(tokens) > 1
        return Outcome(tokens, ended=output.over) if more else None

    def _follow(self, output: _Output, token: int) -> None:
        """Take in a token that was decided."""
        output.position += 1
        if _thinks(output):
            assert output.thinking is not None
            output.thinking.follow(token)
            return
        matcher = output.matcher
        if matcher is not None and not matcher.accept(token):
            output.error = matcher.error() or f"the grammar does not allow token {token}"

    def _jump(self, output: _Output) -> tuple[int, ...]:
        """Tokens that are certain now; the output has moved past them."""
        if not output.jumps or _thinks(output) or output.error or output.matcher is None:
            return ()
        assert self._jumper is not None
        tokens = self._jumper.advance(output.matcher)
        output.position += len(tokens)
        self.certain_tokens += len(tokens)
        return tokens

    # ---- in the thread of the masks

    def _fill(self, todo: list[_Output]) -> None:
        for row, output in enumerate(todo):
            bits = self._bits[row]
            if due := _due(output):
                bits[:] = 0
                _set(bits, due[:1], on=True)
                continue
            assert output.matcher is not None
            assert self._vocabulary is not None
            if not output.matcher.fill_mask(bits):
                bits[:] = -1
            _set(bits, self._vocabulary.eos_ids, on=False)
            if output.matcher.is_accepting():
                _set(bits, output.ends, on=True)
            if not bits.any():
                reason = output.matcher.error()
                output.error = reason or "the grammar allows no token of the vocabulary here"


def _is_masked(output: _Output) -> bool:
    if output.pending or output.over or output.error:
        return False
    return bool(_due(output)) if _thinks(output) else output.matcher is not None


def _thinks(output: _Output) -> bool:
    return output.thinking is not None and not output.thinking.over


def _due(output: _Output) -> tuple[int, ...]:
    """Ids that are forced, one after the other."""
    return output.thinking.due if output.thinking is not None else ()


def _tracker(request: GenerateRequest, *, is_constrained: bool) -> ThoughtTracker | None:
    """Follows the thinking of a request; None if nothing depends on it.

    An output that is constrained from its first token on has no way to begin thinking.
    """
    thinking = request.thinking
    if thinking is None:
        return None
    matters = thinking.inside if is_constrained else thinking.budget is not None
    return ThoughtTracker(thinking) if matters else None


def _is_over(output: _Output) -> bool:
    """Whether nothing can follow."""
    return not _thinks(output) and output.matcher is not None and output.matcher.is_terminated()


def _may_end(output: _Output) -> bool:
    if _thinks(output) or output.matcher is None:
        return False
    return output.matcher.is_accepting()


def _set(bits: IntArray, ids: tuple[int, ...], *, on: bool) -> None:
    """Allow or forbid some ids."""
    words = bits.view(np.uint32)
    for token in ids:
        if token >> 5 < len(words):
            bit = np.uint32(1 << (token & 31))
            words[token >> 5] = words[token >> 5] | bit if on else words[token >> 5] & ~bit

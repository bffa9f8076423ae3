"""Converts tokens to text for the client, and detects stop strings in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec

from sylvan.protocol.errors import RequestError
from sylvan.protocol.messages import (
    Finish,
    FlushText,
    StartDetokenizing,
    StopFound,
    TextBatch,
    TextOutput,
    ToDetokenizer,
    TokenBatch,
    TokenLogprobs,
    TokenOutput,
)
from sylvan.protocol.names import epoch_of
from sylvan.text.detokenizer import (
    DetokenizerOptions,
    DetokenizerVocabulary,
    IncrementalDetokenizer,
)


@dataclass(slots=True)
class _Text:
    """The text of one sample.

    `detokenized` counts the output tokens in the text, `emitted` those that were
    sent; `buffered` holds the outputs of the others. `error` is why detokenisation failed;
    it is raised with the first tokens.
    """

    text: IncrementalDetokenizer
    no_stop_trim: bool
    has_stops: bool
    interval: int | None = 1
    detokenized: int = 0
    emitted: int = 0
    buffered: list[TextOutput] = field(default_factory=list[TextOutput])
    weight_version: str | None = None  # of its last output
    error: RequestError | None = None

    @property
    def due(self) -> bool:
        """Whether to send the buffer now; the first tokens and the finish are always sent."""
        if not self.emitted or self.buffered[-1].output.finish is not None:
            return True
        return self.interval is not None and self.detokenized - self.emitted >= self.interval

    def drain(self) -> list[TextOutput]:
        """Return the buffered outputs."""
        buffered, self.buffered, self.emitted = self.buffered, [], self.detokenized
        return buffered


@dataclass(frozen=True, slots=True)
class DetokenizerReply:
    """Result of a message: texts for the API process, stops for the scheduler."""

    texts: TextBatch | None = None
    stops: tuple[StopFound, ...] = ()


class DetokenizerManager:
    """Detokenizes every live sample.

    The result depends only on the tokens, not on how they were split into messages or when the
    scheduler learns of a stop: tokens after a stop are removed from IDs, log probabilities and
    usage here.
    """

    def __init__(self, vocabulary: DetokenizerVocabulary) -> None:
        self._vocabulary = vocabulary
        self._texts: dict[str, _Text] = {}
        self._epoch = 0

    @property
    def num_live(self) -> int:
        """Number of samples being detokenized."""
        return len(self._texts)

    def handle(self, message: ToDetokenizer) -> DetokenizerReply:
        """Handle a message from the scheduler."""
        match message:
            case StartDetokenizing():
                self._start(message)
                return DetokenizerReply()
            case FlushText():
                unread = (text for text in self._texts.values() if text.interval is None)
                return _answer([part for text in unread for part in text.drain()])
            case TokenBatch():
                return self._push_all(message)

    def _start(self, message: StartDetokenizing) -> None:
        self._forget_before(epoch_of(message.rid))
        options = DetokenizerOptions(
            skip_special_tokens=message.skip_special_tokens,
            spaces_between_special_tokens=message.spaces_between_special_tokens,
            no_stop_trim=message.no_stop_trim,
        )
        tail = message.prompt_tail_ids
        state = _Text(
            IncrementalDetokenizer(self._vocabulary, options, prompt_tail_ids=tail),
            message.no_stop_trim,
            has_stops=bool(message.stop or message.stop_regex),
            interval=message.interval,
            detokenized=len(message.output_ids),
        )
        self._texts[message.rid] = state
        if state.has_stops:
            options = replace(options, stop=message.stop, stop_regex=message.stop_regex)
        try:
            state.text = IncrementalDetokenizer(self._vocabulary, options, prompt_tail_ids=tail)
            state.detokenized = state.text.push(message.output_ids).kept_tokens
        except RequestError as error:
            state.error = error

    def _forget_before(self, epoch: int) -> None:
        if epoch > self._epoch:
            self._epoch = epoch
            self._texts = {n: text for n, text in self._texts.items() if epoch_of(n) >= epoch}

    def _push_all(self, batch: TokenBatch) -> DetokenizerReply:
        texts: list[TextOutput] = []
        stops: list[StopFound] = []
        for output in batch.outputs:
            state = self._texts.get(output.rid)
            if state is None:
                continue  # its text ended before the scheduler knew, or it is of an earlier epoch
            part, matched = _push(state, output)
            if batch.weight_version != state.weight_version:
                state.weight_version = batch.weight_version
                part = msgspec.structs.replace(part, weight_version=batch.weight_version)
            state.buffered.append(part)
            if state.due:
                texts += state.drain()
            if part.output.finish is None:
                continue
            del self._texts[output.rid]
            if state.has_stops:
                stop = StopFound(rid=output.rid, num_tokens=state.detokenized, matched=matched)
                stops.append(stop)
        return _answer(texts, stops)


def _answer(texts: Sequence[TextOutput], stops: Sequence[StopFound] = ()) -> DetokenizerReply:
    return DetokenizerReply(TextBatch(outputs=tuple(texts)) if texts else None, tuple(stops))


def _push(state: _Text, output: TokenOutput) -> tuple[TextOutput, str | None]:
    """Return the text of an output, and the stop that it reached."""
    if (error := state.error) is not None:
        finish = Finish(type="abort", message=str(error), status=400, param=error.param)
        return TextOutput(rid=output.rid, text="", output=_cut(output, 0, state, finish)), ""
    delta = state.text.push(_visible(state, output), final=output.finish is not None)
    if delta.stop is None:
        state.detokenized += len(output.token_ids)
        return TextOutput(rid=output.rid, text=delta.text, output=output), None
    kept = max(0, delta.kept_tokens - state.detokenized)
    state.detokenized = delta.kept_tokens
    finish = Finish(type="stop", matched=delta.stop)
    cut = _cut(output, kept, state, finish)
    return TextOutput(rid=output.rid, text=delta.text, output=cut), delta.stop


def _visible(state: _Text, output: TokenOutput) -> tuple[int, ...]:
    """Return the IDs of visible text: all except a matched stop token."""
    finish, ids = output.finish, output.token_ids
    if finish is None or finish.type != "stop" or state.no_stop_trim:
        return ids
    return ids[:-1] if ids and finish.matched == ids[-1] else ids


def _cut(output: TokenOutput, kept: int, state: _Text, finish: Finish) -> TokenOutput:
    """Return the output without the tokens after the first `kept`, with the finish of its text."""
    return msgspec.structs.replace(
        output,
        token_ids=output.token_ids[:kept],
        logprobs=_first(output.logprobs, kept) if output.logprobs and kept else None,
        usage=msgspec.structs.replace(output.usage, completion_tokens=state.detokenized),
        finish=finish,
    )


def _first(logprobs: TokenLogprobs, count: int) -> TokenLogprobs:
    return TokenLogprobs(
        token_ids=logprobs.token_ids[:count],
        logprobs=logprobs.logprobs[:count],
        top_ids=None if logprobs.top_ids is None else logprobs.top_ids[:count],
        top_logprobs=None if logprobs.top_logprobs is None else logprobs.top_logprobs[:count],
        chosen_logprobs=(
            None if logprobs.chosen_logprobs is None else logprobs.chosen_logprobs[:count]
        ),
    )

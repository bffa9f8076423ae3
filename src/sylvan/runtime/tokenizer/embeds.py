"""Embedding requests: converts texts, or pairs of texts, to scheduler requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from types import MappingProxyType

import msgspec
import numpy as np

from sylvan.protocol.arrays import IntArray
from sylvan.protocol.errors import ContextLengthError, RequestError
from sylvan.protocol.requests import EmbedRequest, VectorForm
from sylvan.runtime.tokenizer.checks import (
    MAX_CHARS_PER_TOKEN,
    MAX_RID_CHARS,
    MAX_TIMEOUT_S,
    PromptIds,
    check_ids,
)
from sylvan.runtime.tokenizer.types import (
    EmbedInput,
    SampleDelta,
    ServedModelInfo,
    Vector,
    error_of,
)
from sylvan.text.pairs import PairEncoder
from sylvan.text.tokenizer import Tokenizer
from sylvan.utils.threads import call_in_pool

_INLINE_CHARS = 2048  # longer texts are tokenised in a thread
_MAX_NUMBERS = 1 << 24  # of the vectors of all tokens of a text: 64 MiB
_INT32 = range(-(2**31), 2**31)
KINDS = {"embed": "makes embeddings", "classify": "classifies texts", "generate": "generates text"}
FORMS: Mapping[VectorForm, str] = MappingProxyType(
    {
        "text": "a vector of each text",
        "tokens": "a vector of each token",
        "weights": "a weight of each word",
        "steps": "a reward of each step",
        "item": "a vector of each image",
    }
)


@dataclass(frozen=True, slots=True)
class EmbedPrompt:
    """Token IDs of a text, the segment of each for pairs, and the field they came from.

    `spans` are the places of its chunks, if it has some.
    """

    ids: PromptIds
    types: Sequence[int] | None
    param: str
    spans: tuple[tuple[int, int], ...] = ()


class EmbedTexts:
    """Tokenises for an embedding model; text never yields control tokens."""

    def __init__(self, tokenizer: Tokenizer, pool: Executor) -> None:
        self._tokenizer, self._pool = tokenizer, pool
        self._pairs = PairEncoder(tokenizer)
        eos = tokenizer.eos_ids[:1]
        self._longest = tokenizer.files.max_tokens
        self._end = eos[0] if eos and tokenizer.files.config.get("add_eos_token") is True else None
        self._padding = tokenizer.pad_id if tokenizer.pad_id is not None else (eos or (0,))[0]
        self._pads_left = tokenizer.files.config.get("padding_side", "right") == "left"

    def max_tokens(self, facts: ServedModelInfo) -> int:
        """Return the length of the longest supported text, in tokens."""
        return min(facts.max_request_tokens, self._longest or facts.max_request_tokens)

    async def read(self, inp: EmbedInput, facts: ServedModelInfo) -> EmbedPrompt:
        """Tokenise the input; long texts do not block the event loop.

        Texts whose steps are judged are conversations in the model's own format, so that control
        tokens in them are recognised.
        """
        if not facts.padded_len or inp.media:
            return await self._read(inp, facts)
        if inp.text is not None:  # such models were trained on small letters (SigLIP)
            inp = msgspec.structs.replace(inp, text=inp.text.lower())
        found = await self._read(inp, facts)
        filler = [self._padding] * (facts.padded_len - len(found.ids))
        ids = [*filler, *found.ids] if self._pads_left else [*found.ids, *filler]
        return replace(found, ids=ids)

    async def _read(self, inp: EmbedInput, facts: ServedModelInfo) -> EmbedPrompt:
        if inp.input_ids is not None:
            return EmbedPrompt(inp.input_ids, None, "input_ids")
        if inp.chunks:
            return await call_in_pool(self._pool, self._joined, inp.chunks)
        assert inp.text is not None
        limit = self.max_tokens(facts) if inp.truncate else None
        if "steps" in facts.forms:
            ids = await call_in_pool(self._pool, self._tokenizer.encode, inp.text)
            return EmbedPrompt(ids, None, "text")
        if len(inp.text) + len(inp.pair or "") <= _INLINE_CHARS:
            return self._encode(inp.text, inp.pair, limit)
        return await call_in_pool(self._pool, self._encode, inp.text, inp.pair, limit)

    def _encode(self, text: str, pair: str | None, limit: int | None) -> EmbedPrompt:
        if pair is not None:
            return EmbedPrompt(*self._pairs.encode(text, pair), "text")
        if limit is not None:
            text = text[: MAX_CHARS_PER_TOKEN * limit]
        ids = self._with_end(self._tokenizer.encode_user(text))
        if limit is not None and len(ids) > limit:
            ids = self._cut(text, ids, limit)
        return EmbedPrompt(ids, None, "text")

    def _joined(self, chunks: Sequence[str]) -> EmbedPrompt:
        """Tokenise chunks one by one, so that their bounds are bounds of tokens."""
        parts = [self._tokenizer.encode_user(text, add_special_tokens=False) for text in chunks]
        whole = self._with_end(self._tokenizer.encode_user(chunks[0]))
        size = len(parts[0])
        starts = (at for at in range(len(whole) - size + 1) if whole[at : at + size] == parts[0])
        first = next(starts, 0)
        ids, spans = whole[:first], list[tuple[int, int]]()
        for part in parts:
            spans.append((len(ids), len(ids) + len(part)))
            ids += part
        return EmbedPrompt([*ids, *whole[first + size :]], None, "input", tuple(spans))

    def _with_end(self, ids: list[int]) -> list[int]:
        if self._end is None or ids[-1:] == [self._end]:
            return ids
        return [*ids, self._end]

    def _cut(self, text: str, ids: list[int], limit: int) -> list[int]:
        """Truncate the text, but none of the special tokens around it."""
        inner = self._tokenizer.encode_user(text, add_special_tokens=False)
        around = len(ids) - len(inner)
        starts = (at for at in range(around + 1) if ids[at : at + len(inner)] == inner)
        first = next(starts, 0)
        kept = inner[: max(0, limit - around)]
        return [*ids[:first], *kept, *ids[first + len(inner) :]]


def check_generates(facts: ServedModelInfo) -> None:
    """Reject generation if the model cannot generate.

    Raises:
        RequestError: The model only computes embeddings.
    """
    if not facts.is_generation:
        message = f"The model {facts.served_name!r} {KINDS[facts.task]}; it does not generate text."
        raise RequestError(message, param="model")


def check_embed(inp: EmbedInput, facts: ServedModelInfo) -> None:
    """Check what can be checked before tokenisation.

    Raises:
        RequestError: A field is out of range, or the model has no embeddings.
    """
    if facts.task == "generate":
        message = f"The model {facts.served_name!r} generates text; it makes no embeddings."
        raise RequestError(message, param="model")
    _check_chunks(inp, facts)
    if not inp.chunks and (inp.text is None) == (inp.input_ids is None):
        given = "neither" if inp.text is None else "both"
        raise RequestError(f"one of text and input_ids is needed, not {given}", param="text")
    size = len(inp.text or "") + len(inp.pair or "") + sum(map(len, inp.chunks))
    if size > MAX_CHARS_PER_TOKEN * facts.context_len and not inp.truncate:
        raise ContextLengthError.of_text(size, facts.context_len, "text")
    if inp.rid is not None and not 0 < len(inp.rid) <= MAX_RID_CHARS:
        raise RequestError(f"rid must have 1 to {MAX_RID_CHARS} characters", param="rid")
    if inp.priority not in _INT32:
        raise RequestError("priority must be a 32-bit integer", param="priority")
    if inp.deadline_s is not None and not 0 < inp.deadline_s <= MAX_TIMEOUT_S:
        raise RequestError(f"deadline_s must be in 0 to {MAX_TIMEOUT_S:g}", param="deadline_s")
    _check_form(inp, facts)
    _check_dimensions(inp.dimensions, facts)


def _check_chunks(inp: EmbedInput, facts: ServedModelInfo) -> None:
    if inp.chunks and ("tokens" not in facts.forms or inp.form not in (None, "text")):
        message = "late_chunking: chunks get the usual vector, of a model that makes one of tokens."
        raise RequestError(message, param="late_chunking")


def _form(inp: EmbedInput, facts: ServedModelInfo) -> VectorForm:
    """The requested form of an input's embedding, or the default."""
    items = inp.media and "item" in facts.forms
    return inp.form or ("item" if items else facts.forms[0])


def _check_form(inp: EmbedInput, facts: ServedModelInfo) -> None:
    form = _form(inp, facts)
    if inp.media and "item" in facts.forms and form != "item":
        message = f"The model {facts.served_name!r} makes {FORMS['item']}, not {FORMS[form]}."
        raise RequestError(message, param="input")
    if form not in facts.forms:
        known = " and ".join(FORMS[form] for form in facts.forms)
        message = f"The model {facts.served_name!r} makes {known}, not {FORMS[form]}."
        raise RequestError(message, param="model")
    if inp.dimensions is not None and form in ("weights", "steps"):
        raise RequestError(f"dimensions: {FORMS[form]} cannot be shortened", param="dimensions")


def _check_dimensions(wanted: int | None, facts: ServedModelInfo) -> None:
    if wanted is None:
        return
    if facts.task == "classify":
        raise RequestError("dimensions: numbers of labels cannot be truncated", param="dimensions")
    if not 1 <= wanted <= facts.vector_size:
        raise RequestError(
            f"dimensions is {wanted}; embeddings of this model have {facts.vector_size} numbers, "
            "and can be truncated to fewer",
            param="dimensions",
        )


def build_embed(
    inp: EmbedInput, prompt: EmbedPrompt, facts: ServedModelInfo, rid: str, limit: int
) -> EmbedRequest:
    """Build the scheduler request; the limit is `limit` tokens.

    Raises:
        RequestError: The text is empty or too long, or an ID is outside the vocabulary.
    """
    count = len(prompt.ids)
    if count == 0:
        raise RequestError(f"{prompt.param} is empty; a text needs a token", param=prompt.param)
    if count > limit:
        raise ContextLengthError.of_prompt(count, limit, prompt.param)
    empty = next((i for i, (start, stop) in enumerate(prompt.spans) if start == stop), None)
    if empty is not None:
        message = f"input[{empty}] is empty; a chunk needs a token"
        raise RequestError(message, param="input")
    form = _form(inp, facts)
    if form == "tokens" and count * facts.vector_size > _MAX_NUMBERS:
        message = (
            f"{prompt.param} has {count} tokens; vectors of each are made of up to "
            f"{_MAX_NUMBERS // facts.vector_size}"
        )
        raise RequestError(message, param=prompt.param)
    types: IntArray | None = None
    if prompt.types is not None and any(prompt.types):
        types = np.array(prompt.types, np.int32)
    return EmbedRequest(
        rid=rid,
        input_ids=check_ids(prompt.ids, facts.vocab_size, prompt.param),
        token_types=types,
        form=form,
        spans=prompt.spans,
        hidden=min(inp.hidden, count - 1),
        dimensions=inp.dimensions,
        normalize=inp.normalize,
        tenant=inp.tenant,
        priority=inp.priority,
        deadline_s=inp.deadline_s,
    )


def vector_of(delta: SampleDelta, prompt: EmbedPrompt) -> Vector:
    """Return the result of a finished request.

    Raises:
        RequestError: It was aborted.
        CapacityError: It was aborted because the server was overloaded.
    """
    if (error := error_of(delta.finish)) is not None:
        raise error
    assert delta.finish is not None, "vectors come with the finish"
    if delta.embedding is None:
        raise RequestError(f"the request was aborted: {delta.finish.message}")
    return Vector(
        rid=delta.rid,
        values=delta.embedding,
        input_ids=tuple(map(int, prompt.ids)),
        usage=delta.usage,
        finish=delta.finish,
        timing=delta.timing,
    )

"""Embeddings and classification: from request bodies to answers, for the server and the Engine."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import secrets
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, cast

import numpy as np
from msgspec.structs import replace

from sylvan.api.native_reply import finish_reason, timing_keys
from sylvan.api.openai.vectors import ClassifyBody, EmbeddingsBody, EncodeBody, MediaInput
from sylvan.protocol.errors import RequestError
from sylvan.protocol.messages import Usage
from sylvan.protocol.requests import VectorForm
from sylvan.runtime.serving.colbert import LateInteractionConfig, Role, read_late_interaction
from sylvan.runtime.serving.labels import Labels
from sylvan.runtime.serving.media_inputs import item_input, media_input, page_input
from sylvan.runtime.serving.prompts import Prompts, read_prompts
from sylvan.runtime.serving.retrieval import check_no_chunks, query_input, read_retrieval
from sylvan.runtime.tokenizer.embeds import KINDS
from sylvan.runtime.tokenizer.manager import TokenizerManager
from sylvan.runtime.tokenizer.types import EmbedInput, Origin, ServedModelInfo, Vector
from sylvan.text.chat_template import ChatTemplate
from sylvan.utils.clock import Clock, monotonic

Reply = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingCaller:
    """The caller of an embedding request.

    Attributes:
        manager: The TokenizerManager.
        tenant: Its tenant.
        clock: Monotonic clock.
        origin: Origin of the call.
    """

    manager: TokenizerManager
    tenant: str = ""
    clock: Clock = monotonic
    origin: Origin | None = None

    @property
    def facts(self) -> ServedModelInfo:
        """The served model."""
        return self.manager.facts

    def adapter(self, asked: str | None, model: str | None) -> str | None:
        """Return the adapter requested by name, or as the model."""
        named = model and self.manager.adapters.find(model, self.tenant)
        return asked or (model if named else None)

    def require_task(self, *tasks: str, what: str) -> None:
        """Check that the model serves one of these tasks; `what`: the results, for the message.

        Raises:
            RequestError: The model serves another task.
        """
        facts = self.facts
        if facts.task not in tasks:
            kind = KINDS["generate" if facts.task == "both" else facts.task]
            message = f"The model {facts.served_name!r} {kind}; it makes no {what}."
            raise RequestError(message, param="model")

    def reject_step_rewards(self, other: str) -> None:
        """Reject a process reward model, which scores each step instead of the whole text.

        Raises:
            RequestError: It is one; the message names the route to use, `other`.
        """
        if "steps" in self.facts.forms:
            message = f"The model {self.facts.served_name!r} scores single steps: use {other}."
            raise RequestError(message, param="model")

    async def vectors(self, inputs: Sequence[EmbedInput]) -> list[Vector]:
        """Return all vectors; if one fails, the others are aborted.

        Raises:
            RequestError: A text cannot be served.
            CapacityError: A text cannot be served now.
        """
        inputs = [replace(inp, tenant=self.tenant, origin=self.origin) for inp in inputs]
        tasks = [asyncio.create_task(self.manager.embed(inp)) for inp in inputs]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def embeddings(caller: EmbeddingCaller, body: EmbeddingsBody, chat: ChatTemplate) -> Reply:
    """Answer `/v1/embeddings`."""
    caller.require_task("embed", "both", what="embeddings")
    lora = caller.adapter(body.lora_path, body.model)
    form = _form(caller.facts, body)
    asked = EmbedInput(
        form=form, dimensions=body.dimensions, priority=body.priority or 0, lora=lora
    )
    prompts = read_prompts(caller.facts.model_path)
    if body.late_chunking:
        check_no_chunks(caller.facts)
        return await _late_chunks(caller, body, asked, prompts)
    inputs = _inputs(body.input, body.rid, asked)
    if form == "tokens" and (late := read_late_interaction(caller.facts.model_path)) is not None:
        vectors = await late_interaction_vectors(caller, late, inputs, _role(body.prompt_name))
    else:
        inputs = _prompted(inputs, prompts, body.prompt_name)
        inputs = await with_media(caller, chat, body.input, queries(caller, inputs))
        vectors = await caller.vectors(inputs)
    if form == "weights":
        hidden = caller.manager.tokenizer.special_ids
        written = [_term_weights(v, hidden) for v in vectors]
    else:
        written = [_written(v.values, body) for v in vectors]
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": i, "embedding": found}
            for i, found in enumerate(written)
        ],
        "model": body.model or caller.facts.served_name,
        "usage": usage_of([v.usage for v in vectors]),
    }


def _role(prompt_name: str | None) -> Role:
    """Return the role of a text for a late-interaction model; a document by default."""
    if prompt_name in (None, "document"):
        return "document"
    if prompt_name == "query":
        return "query"
    message = f"prompt_name: this model knows query and document, not {prompt_name[:80]!r}."
    raise RequestError(message, param="prompt_name")


async def late_interaction_vectors(
    caller: EmbeddingCaller, late: LateInteractionConfig, inputs: Sequence[EmbedInput], role: Role
) -> list[Vector]:
    """Return the token vectors of each input, prepared by the rules of a late-interaction model.

    Inputs of token IDs are not changed.

    Raises:
        RequestError: See `EmbeddingCaller.vectors`.
    """
    tokenizer = caller.manager.tokenizer
    asked = [
        inp if inp.text is None else late.input_of(role, inp.text, tokenizer, inp) for inp in inputs
    ]
    vectors = await caller.vectors(asked)
    if role == "query":
        return vectors
    kept = [
        vector.values if inp.text is None else late.document_vectors(vector, tokenizer)
        for inp, vector in zip(inputs, vectors, strict=True)
    ]
    return [dataclasses.replace(v, values=rows) for v, rows in zip(vectors, kept, strict=True)]


async def _late_chunks(
    caller: EmbeddingCaller, body: EmbeddingsBody, asked: EmbedInput, prompts: Prompts
) -> Reply:
    """Answer with late chunking: one text in chunks, with a vector for each."""
    given = body.input
    texts = [text for text in given if isinstance(text, str)] if isinstance(given, list) else []
    if not texts or not all(texts) or texts != given:
        raise RequestError(
            "late_chunking: input is a list of texts that are not empty.", param="input"
        )
    before = prompts.apply("", body.prompt_name)  # a first chunk whose vector is dropped
    texts = [text.lower() for text in texts] if prompts.lower else texts
    chunks = (*([before] if before else []), *texts)
    [vector] = await caller.vectors([replace(asked, chunks=chunks, rid=body.rid)])
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": i, "embedding": _written(values, body)}
            for i, values in enumerate(vector.values[-len(texts) :])
        ],
        "model": body.model or caller.facts.served_name,
        "usage": usage_of([vector.usage]),
    }


async def encode(caller: EmbeddingCaller, body: EncodeBody) -> Reply | list[Reply]:
    """Answer `/encode`, and `/classify`, where the numbers belong to labels."""
    began_s = caller.clock()
    inputs, is_batch = _native_inputs(body)
    late = read_late_interaction(caller.facts.model_path) if body.return_multivector else None
    if late is not None:
        vectors = await late_interaction_vectors(caller, late, inputs, _role(body.prompt_name))
    else:
        if caller.facts.embeds:
            inputs = _prompted(inputs, read_prompts(caller.facts.model_path), body.prompt_name)
            inputs = queries(caller, inputs)
        vectors = await caller.vectors(inputs)
    now = datetime.now(tz=UTC).timestamp()
    replies = [_native(v, body, caller.clock() - began_s, now) for v in vectors]
    return replies if is_batch else replies[0]


async def classify(caller: EmbeddingCaller, body: ClassifyBody, labels: Labels) -> Reply:
    """Answer `/v1/classify`."""
    caller.require_task("classify", what="classes")
    caller.reject_step_rewards("/classify")
    asked = EmbedInput(priority=body.priority or 0)
    vectors = await caller.vectors(_inputs(body.input, body.rid, asked))
    data: list[Reply] = []
    for index, vector in enumerate(vectors):
        probs = labels.probabilities(vector.values)
        best = int(np.argmax(vector.values))
        data.append(
            {
                "index": index,
                "label": labels.name(best),
                "probs": probs.tolist(),
                "num_classes": len(probs),
            }
        )
    return {
        "id": f"classify-{secrets.token_hex(16)}",
        "object": "list",
        "created": int(datetime.now(tz=UTC).timestamp()),
        "model": body.model or caller.facts.served_name,
        "data": data,
        "usage": usage_of([v.usage for v in vectors]),
    }


def usage_of(usages: Sequence[Usage]) -> Reply:
    """Build the `usage` of requests that generate nothing."""
    prompt = sum(usage.prompt_tokens for usage in usages)
    cached = sum(usage.cached_tokens for usage in usages)
    media: Counter[str] = Counter()
    for usage in usages:
        media.update(usage.media_tokens or {})
    return {
        "prompt_tokens": prompt,
        "completion_tokens": 0,
        "total_tokens": prompt,
        "prompt_tokens_details": {
            "cached_tokens": cached,
            **{f"{kind}_tokens": count for kind, count in media.items()},
        },
    }


def meta_of(vector: Vector, timing: Reply | None = None) -> Reply:
    """Build the `meta_info` of a vector."""
    return {
        "id": vector.rid,
        "finish_reason": finish_reason(vector.finish),
        "prompt_tokens": vector.usage.prompt_tokens,
        "cached_tokens": vector.usage.cached_tokens,
        **(timing or {}),
    }


def _inputs(given: object, rid: str | None, asked: EmbedInput) -> list[EmbedInput]:
    many = isinstance(given, list) and not (given and isinstance(given[0], int))
    items: list[Any] = [*cast("list[Any]", given)] if many else [given]
    if not items or not all(items):
        raise RequestError("input is empty; a text needs a token.", param="input")
    rids = _rids(rid, len(items), many)
    return [_input(item, replace(asked, rid=name)) for item, name in zip(items, rids, strict=True)]


def _input(item: Any, asked: EmbedInput) -> EmbedInput:
    if isinstance(item, MediaInput):
        return asked
    return replace(asked, text=item) if isinstance(item, str) else replace(asked, input_ids=item)


def queries(caller: EmbeddingCaller, inputs: Sequence[EmbedInput]) -> list[EmbedInput]:
    """Return the inputs; of a model that retrieves pages, texts are queries."""
    prompts = read_retrieval(caller.facts.model_path, caller.facts.architecture)
    if prompts is None:
        return list(inputs)
    return [query_input(inp, prompts, caller.manager.tokenizer) for inp in inputs]


async def with_media(
    caller: EmbeddingCaller,
    chat: ChatTemplate,
    given: object,
    inputs: Sequence[EmbedInput],
    field: str = "input",
) -> list[EmbedInput]:
    """Return the inputs, those with media rendered.

    Args:
        caller: The caller.
        chat: The model's template.
        given: The field's value: one input, or a list.
        inputs: One for each.
        field: Its name.

    Raises:
        RequestError: An input is empty, or cannot be rendered.
    """
    items: list[Any] = list(given) if isinstance(given, list) else [given]
    if len(items) != len(inputs):
        return list(inputs)  # a prompt of token ids
    paths = [f"{field}[{i}]" if isinstance(given, list) else field for i in range(len(items))]
    return [
        await _rendered(caller, chat, item, path, asked) if isinstance(item, MediaInput) else asked
        for item, path, asked in zip(items, paths, inputs, strict=True)
    ]


async def _rendered(
    caller: EmbeddingCaller, chat: ChatTemplate, item: MediaInput, path: str, asked: EmbedInput
) -> EmbedInput:
    facts = caller.facts
    if "item" in facts.forms:
        return item_input(item, path, asked, facts)
    prompts = read_retrieval(facts.model_path, facts.architecture)
    if prompts is not None:
        return page_input(item, path, asked, prompts, facts, caller.manager.tokenizer)
    return await media_input(chat, item, path, asked)


def _prompted(inputs: list[EmbedInput], prompts: Prompts, name: str | None) -> list[EmbedInput]:
    """Prepend the prompt to every text; token IDs stay as given."""
    return [
        inp if inp.text is None else replace(inp, text=prompts.apply(inp.text, name))
        for inp in inputs
    ]


def _native_inputs(body: EncodeBody) -> tuple[list[EmbedInput], bool]:
    if (body.text is None) == (body.input_ids is None):
        raise RequestError("Exactly one of text and input_ids must be given.", param="text")
    given: Any = body.text if body.text is not None else body.input_ids
    many = not isinstance(given, str) and not (given and isinstance(given[0], int))
    items: list[Any] = [*cast("list[Any]", given)] if many else [given]
    field = "text" if body.text is not None else "input_ids"
    if not items or not all(items):
        raise RequestError(f"{field} is empty; a text needs a token.", param=field)
    rids = _rids(body.rid, len(items), many)
    asked = EmbedInput(
        form="tokens" if body.return_multivector else None,
        dimensions=body.dimensions,
        priority=body.priority or 0,
        lora=body.lora_path,
    )
    return [_native_input(i, n, asked) for i, n in zip(items, rids, strict=True)], many


def _native_input(item: Any, rid: str | None, asked: EmbedInput) -> EmbedInput:
    if isinstance(item, str):
        return replace(asked, text=item, rid=rid)
    if isinstance(item[0], int):
        return replace(asked, input_ids=item, rid=rid)
    if len(item) != 2:
        raise RequestError("text: a pair is a list of two texts.", param="text")
    return replace(asked, text=item[0], pair=item[1], rid=rid)


def _rids(rid: str | list[str] | None, size: int, many: bool) -> list[str | None]:
    if rid is None:
        return [None] * size
    if isinstance(rid, str):
        return [f"{rid}_{i}" for i in range(size)] if many else [rid]
    if len(rid) != size:
        raise RequestError(f"rid: one for each of the {size} texts is needed.", param="rid")
    return list(rid)


def _form(facts: ServedModelInfo, body: EmbeddingsBody) -> VectorForm | None:
    """Return the form of vectors that a body requests; None: the model's default."""
    sparse = body.encoding_format == "sparse"
    if body.return_multivector:
        if sparse:
            message = "encoding_format: token vectors cannot be sparse."
            raise RequestError(message, param="encoding_format")
        return "tokens"
    return "weights" if sparse and "weights" in facts.forms else None


def _term_weights(vector: Vector, hidden: Collection[int]) -> Reply:
    """Return the largest weight of each token ID in a text, without special tokens."""
    found: dict[int, float] = {}
    for token, weight in zip(vector.input_ids, vector.values.tolist(), strict=True):
        if weight > 0 and token not in hidden:
            found[token] = max(weight, found.get(token, 0.0))
    order = sorted(found)
    return {"indices": order, "values": [found[token] for token in order]}


def _written(values: np.ndarray, body: EmbeddingsBody) -> Any:
    if values.ndim > 1 and body.encoding_format == "base64":
        return [_written(row, body) for row in values]
    if values.ndim == 1 and body.encoding_format == "sparse":
        indices = np.flatnonzero(values)
        return {"indices": indices.tolist(), "values": values[indices].tolist()}
    if body.encoding_format == "base64":
        return base64.b64encode(values.astype("<f4").tobytes()).decode("ascii")
    return values.tolist()


def _native(vector: Vector, body: EncodeBody, elapsed_s: float, now: float) -> Reply:
    reply: Reply = {
        "embedding": vector.values.tolist(),
        "meta_info": meta_of(vector, timing_keys(vector.timing, elapsed_s, now, 0)),
    }
    if body.return_prompt_token_ids:
        reply["prompt_token_ids"] = list(vector.input_ids)
    return reply

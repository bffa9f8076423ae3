"""Reranking of documents, and scoring of items, with whatever the model supports."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from sylvan.api.openai.vectors import MediaInput, RerankBody, ScoreBody
from sylvan.protocol.errors import RequestError
from sylvan.protocol.messages import Usage
from sylvan.protocol.requests import LogprobOptions, VectorForm
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.serving.colbert import LateInteractionConfig, read_late_interaction
from sylvan.runtime.serving.embeddings import (
    EmbeddingCaller,
    Reply,
    late_interaction_vectors,
    meta_of,
    queries,
    usage_of,
    with_media,
)
from sylvan.runtime.serving.labels import Labels
from sylvan.runtime.serving.prompts import DOCUMENT, QUERY, read_prompts
from sylvan.runtime.tokenizer.types import EmbedInput, GenerateInput, SampleDelta, error_of
from sylvan.text.chat_template import ChatRequest, ChatTemplate
from sylvan.text.pairs import PairEncoder
from sylvan.utils.threads import call_in_thread

TASK = "Given a web search query, retrieve relevant passages that answer the query"
_JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """The result of `Engine.score`.

    Attributes:
        scores: For each item the probabilities of the label tokens, or the numbers of the labels.
        prompt_tokens: Tokens of all prompts.
        token_logprobs: Log probabilities of the label tokens, if asked for.
    """

    scores: list[list[float]]
    prompt_tokens: int = 0
    token_logprobs: list[list[float]] | None = None


@dataclass(frozen=True, slots=True)
class ScoredDocument:
    """The relevance score of a document, and its `meta_info`."""

    score: float
    meta: Reply


async def rerank(
    caller: EmbeddingCaller, body: RerankBody, labels: Labels, chat: ChatTemplate
) -> list[Any]:
    """Answer `/v1/rerank`: best document first.

    A classifier with one or two labels reads query and document as a pair; an embedder compares
    their vectors; a generative model is asked for yes or no, as Qwen3-Reranker was trained.
    """
    task = caller.facts.task
    by_vector = task == "embed" or (task == "both" and not _verdicts(caller))
    if body.late_interaction and not by_vector:
        message = "late_interaction: this model computes no embeddings."
        raise RequestError(message, param="late_interaction")
    if by_vector:
        found = await _by_vector(caller, body, chat)
    else:
        _check_texts(body)
        by_label = task == "classify"
        found = await (
            _by_label(caller, body, labels) if by_label else _by_answer(caller, body, chat)
        )
    order = sorted(range(len(found)), key=lambda i: (-found[i].score, i))[: body.top_n]
    with_text = body.return_documents is not False
    return [
        {
            "score": found[i].score,
            **(_document_text(body.documents[i]) if with_text else {}),
            "index": i,
            "meta_info": found[i].meta,
        }
        for i in order
    ]


def _document_text(document: str | MediaInput) -> Reply:
    """Return the text of a document, for the answer; its media are not sent back."""
    text = document.text if isinstance(document, MediaInput) else document
    return {} if text is None else {"document": text}


def _check_texts(body: RerankBody) -> None:
    """Refuse media where vectors are not compared."""
    given = {"query": body.query} | {f"documents[{i}]": d for i, d in enumerate(body.documents)}
    for path, item in given.items():
        if isinstance(item, MediaInput):
            raise RequestError(
                f"{path}: this model ranks texts only; ranking media needs an embedding model.",
                param=path,
            )


async def _by_label(
    caller: EmbeddingCaller, body: RerankBody, labels: Labels
) -> list[ScoredDocument]:
    caller.reject_step_rewards("/classify")
    if caller.facts.vector_size > 2:
        count = caller.facts.vector_size
        message = f"The model has {count} labels; ranking needs one with a single label, or two."
        raise RequestError(message, param="model")
    pairs = [EmbedInput(text=_asked(body), pair=_text(document)) for document in body.documents]
    vectors = await caller.vectors(pairs)
    return [ScoredDocument(labels.relevance(v.values) or 0.0, meta_of(v)) for v in vectors]


async def _by_vector(
    caller: EmbeddingCaller, body: RerankBody, chat: ChatTemplate
) -> list[ScoredDocument]:
    prompts = read_prompts(caller.facts.model_path)
    late = read_late_interaction(caller.facts.model_path)
    wanted = body.late_interaction or (body.late_interaction is None and late is not None)
    if late is not None and wanted:
        return await _by_conventions(caller, body, late)
    name, others = prompts.first_of(*QUERY), prompts.first_of(*DOCUMENT)
    by_token = body.late_interaction or caller.facts.forms[0] == "tokens"
    form: VectorForm | None = "tokens" if by_token else None
    asked = EmbedInput(form=form)
    if isinstance(body.query, str):
        text = _asked(body) if body.instruct else prompts.apply(body.query, name)
        asked = EmbedInput(text=text, form=form)
    elif body.instruct:
        message = "instruct: give it as `instruct` of the query, which has media."
        raise RequestError(message, param="instruct")
    inputs = [
        EmbedInput(text=prompts.apply(given, others), form=form)
        if isinstance(given, str)
        else EmbedInput(form=form)
        for given in body.documents
    ]
    [asked, *inputs] = queries(caller, [asked, *inputs])
    [asked] = await with_media(caller, chat, body.query, [asked], "query")
    inputs = await with_media(caller, chat, body.documents, inputs, "documents")
    query, *documents = await caller.vectors([asked, *inputs])
    compared = _late_interaction if by_token else _cosine
    return [ScoredDocument(compared(query.values, v.values), meta_of(v)) for v in documents]


async def _by_conventions(
    caller: EmbeddingCaller, body: RerankBody, late: LateInteractionConfig
) -> list[ScoredDocument]:
    """Score by late interaction, with texts prepared by the checkpoint's rules."""
    _check_texts(body)
    form: VectorForm = "tokens"
    query = EmbedInput(text=_asked(body), form=form)
    texts = [EmbedInput(text=_text(document), form=form) for document in body.documents]
    [asked] = await late_interaction_vectors(caller, late, [query], "query")
    found = await late_interaction_vectors(caller, late, texts, "document")
    return [ScoredDocument(_late_interaction(asked.values, v.values), meta_of(v)) for v in found]


def _late_interaction(query: np.ndarray, document: np.ndarray) -> float:
    """Return the mean, over query tokens, of the best similarity to a document token (MaxSim).

    ColBERT (arXiv:2004.12832) takes the sum; the mean, as in BGE-M3, lies in -1 to 1. Shapes: (n,
    D), (m, D).
    """
    if not len(query) or not len(document):
        return 0.0
    similar = query.astype(np.float64) @ document.astype(np.float64).T
    return float(similar.max(1).mean())


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    wide = a.astype(np.float64), b.astype(np.float64)
    lengths = float(np.linalg.norm(wide[0]) * np.linalg.norm(wide[1]))
    return float(wide[0] @ wide[1]) / lengths if lengths else 0.0


def _asked(body: RerankBody) -> str:
    query = _text(body.query)
    return f"{body.instruct}\n{query}" if body.instruct else query


def _text(given: str | MediaInput) -> str:
    assert isinstance(given, str), "checked before"
    return given


async def _by_answer(
    caller: EmbeddingCaller, body: RerankBody, chat: ChatTemplate
) -> list[ScoredDocument]:
    wanted = _verdicts(caller)
    if not wanted:
        message = (
            f"The model {caller.facts.served_name!r} generates text, and cannot be asked for yes "
            "or no: it has no chat template, or no token for each of the two."
        )
        raise RequestError(message, param="model")
    prompts = [
        await call_in_thread(_judge_prompt, chat, body, _text(document))
        for document in body.documents
    ]
    samples = await _next_tokens(caller, prompts, [wanted] * len(prompts), 1.0)
    return [ScoredDocument(_softmax(sample.logprobs)[0], sample.meta) for sample in samples]


def _verdicts(caller: EmbeddingCaller) -> list[int]:
    """Return the tokens for yes and no; none if the model cannot be asked."""
    tokenizer = caller.manager.tokenizer
    words = [tokenizer.encode_user(word, add_special_tokens=False) for word in ("yes", "no")]
    asked = tokenizer.chat_template is not None and all(len(ids) == 1 for ids in words)
    return [ids[0] for ids in words] if asked else []


def _judge_prompt(chat: ChatTemplate, body: RerankBody, document: str) -> list[int]:
    query = _text(body.query)
    asked = f"<Instruct>: {body.instruct or TASK}\n<Query>: {query}\n<Document>: {document}"
    messages = [{"role": "system", "content": _JUDGE}, {"role": "user", "content": asked}]
    request = ChatRequest(messages=messages, kwargs={"enable_thinking": False})
    return chat.render(request).input_ids


def _softmax(logprobs: Sequence[float]) -> list[float]:
    powers = [math.exp(value - max(logprobs)) for value in logprobs]
    return [power / sum(powers) for power in powers]


@dataclass(frozen=True, slots=True)
class _NextToken:
    """Log probabilities of the requested tokens."""

    logprobs: list[float]
    usage: Usage
    meta: Reply


async def _next_tokens(
    caller: EmbeddingCaller,
    prompts: Sequence[Sequence[int]],
    labels: Sequence[Sequence[int]],
    temperature: float,
) -> list[_NextToken]:
    """Return the probability of each label token after each prompt."""
    sampling = SamplingParams(max_new_tokens=1, temperature=temperature)
    inputs = [
        GenerateInput(
            input_ids=ids,
            sampling=sampling,
            stream=False,
            logprobs=LogprobOptions(token_ids=tuple(wanted)),
            tenant=caller.tenant,
            origin=caller.origin,
        )
        for ids, wanted in zip(prompts, labels, strict=True)
    ]
    tasks = [asyncio.create_task(_next_token(caller, inp)) for inp in inputs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _next_token(caller: EmbeddingCaller, inp: GenerateInput) -> _NextToken:
    last: SampleDelta | None = None
    async with aclosing(caller.manager.generate(inp)) as deltas:
        async for delta in deltas:
            last = delta
    assert last is not None, "a stream has an end"
    if (error := error_of(last.finish)) is not None:
        raise error
    if last.logprobs is None or last.finish is None:
        raise RequestError("the request was aborted")
    assert last.logprobs.chosen_logprobs is not None, "label ids were asked for"
    meta = {"id": last.rid, "prompt_tokens": last.usage.prompt_tokens}
    return _NextToken(last.logprobs.chosen_logprobs[0].tolist(), last.usage, meta)


async def score(caller: EmbeddingCaller, body: ScoreBody) -> Reply:
    """Answer `/v1/score`: probabilities of label tokens, or the numbers of labels."""
    caller.require_task("generate", "both", "classify", what="scores")
    items: Any = [body.items] if isinstance(body.items, str) else body.items
    if not items:
        raise RequestError("items must be given.", param="items")
    if body.query is None:
        raise RequestError("query must be given.", param="query")
    if isinstance(body.query, str) != isinstance(items[0], str):
        message = "items: query and items must both be text, or both be token ids."
        raise RequestError(message, param="items")
    if caller.facts.task == "classify":
        caller.reject_step_rewards("/classify")
        rows, usages = await _label_scores(caller, body, items)
        scores = [_softmax(row) if body.apply_softmax else row for row in rows]
    else:
        rows, usages = await _token_scores(caller, body, items)
        scores = [_scores(row, softmax=bool(body.apply_softmax)) for row in rows]
    reply: Reply = {
        "scores": scores,
        "model": body.model or caller.facts.served_name,
        "usage": usage_of(usages),
        "object": "scoring",
    }
    if body.return_token_logprobs and caller.facts.task != "classify":
        reply["token_logprobs"] = rows
    return reply


def _ids(part: object) -> list[int]:
    """Return the token IDs of a part that is not text; validated before."""
    if not isinstance(part, list):
        raise RequestError("query and items are all texts, or all token ids", param="items")
    return cast("list[int]", part)


async def _label_scores(
    caller: EmbeddingCaller, body: ScoreBody, items: list[Any]
) -> tuple[list[list[float]], list[Usage]]:
    pairs = PairEncoder(caller.manager.tokenizer).separates()
    inputs: list[EmbedInput] = []
    for item in items:
        first, second = (item, body.query) if body.item_first else (body.query, item)
        if isinstance(first, str) and isinstance(second, str):
            whole = EmbedInput(text=first + second)
            inputs.append(EmbedInput(text=first, pair=second) if pairs else whole)
        else:
            inputs.append(EmbedInput(input_ids=[*_ids(first), *_ids(second)]))
    vectors = await caller.vectors(inputs)
    return [v.values.tolist() for v in vectors], [v.usage for v in vectors]


async def _token_scores(
    caller: EmbeddingCaller, body: ScoreBody, items: list[Any]
) -> tuple[list[list[float]], list[Usage]]:
    labels = _label_ids(body, len(items))
    prompts: list[list[int]] = []
    for item in items:
        query: Any = body.query
        joined: Any = item + query if body.item_first else query + item
        is_text = isinstance(joined, str)
        prompts.append(await caller.manager.tokenize(joined) if is_text else joined)
    found = await _next_tokens(caller, prompts, labels, body.temperature or 1.0)
    return [sample.logprobs for sample in found], [sample.usage for sample in found]


def _scores(row: list[float], *, softmax: bool) -> list[float]:
    values = [math.exp(value) for value in row]
    total = sum(values)
    return [value / total for value in values] if softmax and total else values


def _label_ids(body: ScoreBody, num_items: int) -> list[list[int]]:
    ids: Any = body.label_token_ids
    if not ids:
        message = "label_token_ids must be given: this model generates text."
        raise RequestError(message, param="label_token_ids")
    if isinstance(ids[0], int):
        return [ids] * num_items
    if len(ids) != num_items or not all(ids):
        message = f"label_token_ids: one list of ids for each of the {num_items} items."
        raise RequestError(message, param="label_token_ids")
    return ids

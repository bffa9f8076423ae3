"""`/v2/rerank` and `/rerank`: rankings in the formats of Cohere, Jina and TEI."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from starlette.responses import Response

from sylvan.api.openai.vectors import RerankBody
from sylvan.api.rerank import CohereRerankBody, PlainRerankBody, TextDocument
from sylvan.protocol.errors import RequestError
from sylvan.runtime.server.endpoint import Call, json_response
from sylvan.runtime.server.openai.embeddings import caller_of
from sylvan.runtime.server.streaming import cancel_on_disconnect
from sylvan.runtime.serving import ranking
from sylvan.runtime.serving.labels import read_labels

_MARKS = 16  # maximum number of special tokens around a query and a text


async def cohere(call: Call[CohereRerankBody]) -> Response:
    """Rank documents by relevance, in Cohere's format."""
    body = call.body
    texts = _texts(body.documents)
    if body.max_tokens_per_doc is not None:
        texts = [await _cut(call, text, body.max_tokens_per_doc) for text in texts]
    found = await _ranked(call, texts)
    results = [
        {"index": one["index"], "relevance_score": one["score"]} for one in found[: body.top_n]
    ]
    meta = {"api_version": {"version": "2"}, "tokens": {"input_tokens": _tokens(found)}}
    return json_response({"id": str(uuid4()), "results": results, "meta": meta})


async def plain(call: Call[PlainRerankBody]) -> Response:
    """Rank documents by relevance, in Jina's format, or TEI's if they are `texts`."""
    body = call.body
    if (body.documents is None) == (body.texts is None):
        given = "neither" if body.texts is None else "both"
        message = f"documents: one of documents and texts is needed, not {given}."
        raise RequestError(message, param="documents")
    if body.raw_scores:
        message = "raw_scores is not supported: /v1/rerank returns scores only."
        raise RequestError(message, param="raw_scores")
    is_tei = body.texts is not None
    texts = body.texts or _texts(body.documents or ())
    if body.truncate:
        query = await call.context.engine.tokenize(body.query, trusted=False)
        room = max(1, call.context.engine.facts.context_len - len(query) - _MARKS)
        texts = [await _cut(call, text, room) for text in texts]
    found = await _ranked(call, texts)
    total, found = _tokens(found), found[: body.top_n]
    if is_tei:
        ranked = [{"index": one["index"], "score": one["score"]} for one in found]
        if body.return_text:
            ranked = [{**one, "text": texts[one["index"]]} for one in ranked]
        return json_response(ranked)
    results = [{"index": one["index"], "relevance_score": one["score"]} for one in found]
    if body.return_documents is not False:
        results = [{**one, "document": {"text": texts[one["index"]]}} for one in results]
    name = body.model or call.context.settings.served_model_name
    usage = {"total_tokens": total, "prompt_tokens": total}
    return json_response({"model": name, "usage": usage, "results": results})


def _texts(documents: Sequence[str | TextDocument]) -> list[str]:
    return [one if isinstance(one, str) else one.text for one in documents]


async def _cut(call: Call[Any], text: str, limit: int) -> str:
    """Truncate a text to a number of tokens."""
    engine = call.context.engine
    ids = await engine.tokenize(text, add_special_tokens=False, trusted=False)
    return text if len(ids) <= limit else await engine.detokenize(ids[:limit])


async def _ranked(call: Call[Any], texts: list[str]) -> list[dict[str, Any]]:
    body = RerankBody(query=call.body.query, documents=[*texts], return_documents=False)
    labels = read_labels(call.context.engine.facts.model_path)
    work = ranking.rerank(caller_of(call), body, labels, call.context.template)
    return await cancel_on_disconnect(call.request, work)


def _tokens(found: Sequence[dict[str, Any]]) -> int:
    """Count the tokens of all queries and texts."""
    return sum(one["meta_info"]["prompt_tokens"] for one in found)

"""Routes of encoder models: embeddings, classes, scores, rankings."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from sylvan.api.openai.vectors import (
    ClassifyBody,
    EmbeddingsBody,
    EncodeBody,
    RerankBody,
    ScoreBody,
)
from sylvan.runtime.server.endpoint import Call, json_response
from sylvan.runtime.server.streaming import cancel_on_disconnect
from sylvan.runtime.serving import embeddings as serving
from sylvan.runtime.serving import ranking
from sylvan.runtime.serving.embeddings import EmbeddingCaller
from sylvan.runtime.serving.labels import read_labels


async def embeddings(call: Call[EmbeddingsBody]) -> Response:
    """Embed texts."""
    work = serving.embeddings(caller_of(call), call.body, call.context.template)
    return json_response(await cancel_on_disconnect(call.request, work))


async def classify(call: Call[ClassifyBody]) -> Response:
    """Classify texts."""
    work = serving.classify(caller_of(call), call.body, _labels(call))
    return json_response(await cancel_on_disconnect(call.request, work))


async def rerank(call: Call[RerankBody]) -> Response:
    """Rank documents by relevance."""
    work = ranking.rerank(caller_of(call), call.body, _labels(call), call.context.template)
    return json_response(await cancel_on_disconnect(call.request, work))


async def score(call: Call[ScoreBody]) -> Response:
    """Return the probability of each label for every item."""
    query, items = call.body.query or "", call.body.items or ""
    longest = len(items) if isinstance(items, str) else max(map(len, items), default=0)
    if len(query) > longest:
        call.names["input_ids"] = "query"
    work = ranking.score(caller_of(call), call.body)
    return json_response(await cancel_on_disconnect(call.request, work))


async def encode(call: Call[EncodeBody]) -> Response:
    """Embed texts, in the native format."""
    caller = caller_of(call)
    caller.require_task("embed", "both", "classify", what="vectors")
    return json_response(
        await cancel_on_disconnect(call.request, serving.encode(caller, call.body))
    )


async def classify_natively(call: Call[EncodeBody]) -> Response:
    """Classify texts, in the native format."""
    caller = caller_of(call)
    caller.require_task("classify", what="classes")
    return json_response(
        await cancel_on_disconnect(call.request, serving.encode(caller, call.body))
    )


def caller_of(call: Call[Any]) -> EmbeddingCaller:
    """Return the caller for whom vectors are computed."""
    context = call.context
    return EmbeddingCaller(
        manager=context.engine,
        tenant=call.tenant.name,
        clock=context.clock,
        origin=context.service.origin,
    )


def _labels(call: Call[Any]) -> Any:
    return read_labels(call.context.engine.facts.model_path)

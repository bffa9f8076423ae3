"""Routes of Anthropic's and Ollama's APIs, and those that cloud platforms call."""

from __future__ import annotations

from typing import Any

from sylvan.api.anthropic import AnthropicMessage, CountBody, CountReply, MessagesBody
from sylvan.api.anthropic_batches import (
    DeletedBatchReply,
    MessageBatchBody,
    MessageBatchesReply,
    MessageBatchQuery,
    MessageBatchReply,
)
from sylvan.api.client_fields import TOOL_SCHEMA, grammars_in
from sylvan.api.errors import Family
from sylvan.api.ollama import (
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaEmbeddingsReply,
    OllamaEmbedReply,
    OllamaGenerateBody,
    OllamaPullBody,
    OllamaReply,
    OllamaShow,
    OllamaShowBody,
    OllamaTags,
    OllamaVersion,
)
from sylvan.runtime.server.anthropic import batches, messages
from sylvan.runtime.server.endpoint import Endpoint
from sylvan.runtime.server.native import cloud
from sylvan.runtime.server.native.cloud import VertexBody, VertexReply
from sylvan.runtime.server.ollama import embeddings as ollama_embeddings
from sylvan.runtime.server.ollama import generation
from sylvan.runtime.server.ollama import models as ollama_models
from sylvan.runtime.server.ollama.options import option_fields
from sylvan.runtime.server.routes.build import GET, NDJSON, SSE, opened


def _anthropic(path: str, **fields: Any) -> Endpoint:
    return Endpoint(
        **{"path": path, "family": Family.ANTHROPIC, "tag": "Anthropic", "typed": True, **fields}
    )


def _ollama(path: str, **fields: Any) -> Endpoint:
    return Endpoint(**{"path": path, "family": Family.OLLAMA, "tag": "Ollama", **fields})


_FIELD_NAMES = {
    "text": "messages",
    "input_ids": "messages",
    "max_new_tokens": "max_tokens",
    "json_schema": "output_config.format.schema",
    TOOL_SCHEMA: ".input_schema",
}
_OLLAMA_FIELD_NAMES = {
    "json_schema": "format",
    "max_new_tokens": "options.num_predict",
    **option_fields(),
}
_OLLAMA_CHAT_FIELD_NAMES = {**_OLLAMA_FIELD_NAMES, "text": "messages", "input_ids": "messages"}
_OLLAMA_PROMPT_FIELD_NAMES = {**_OLLAMA_FIELD_NAMES, "text": "prompt", "input_ids": "prompt"}

_BATCH = "/{batch_id}"
_BATCHES: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "",
        {
            "handler": batches.create,
            "body": MessageBatchBody,
            "reply": MessageBatchReply,
            "budgeted": True,
            "typed": True,
        },
    ),
    (
        "",
        {
            "handler": batches.list_batches,
            "methods": GET,
            "query": MessageBatchQuery,
            "reply": MessageBatchesReply,
        },
    ),
    (_BATCH, {"handler": batches.retrieve, "methods": GET, "reply": MessageBatchReply}),
    (_BATCH, {"handler": batches.delete, "methods": ("DELETE",), "reply": DeletedBatchReply}),
    (f"{_BATCH}/cancel", {"handler": batches.cancel, "reply": MessageBatchReply}),
    (
        f"{_BATCH}/results",
        {"handler": batches.results, "methods": GET, "media_type": "application/x-jsonl"},
    ),
)

VENDORS = (
    _anthropic(
        "/v1/messages",
        handler=messages.messages,
        body=MessagesBody,
        reply=AnthropicMessage,
        stream=SSE,
        budgeted=True,
        field_names=_FIELD_NAMES,
    ),
    _anthropic(
        "/v1/messages/count_tokens",
        handler=messages.count_tokens,
        body=CountBody,
        reply=CountReply,
    ),
    *(
        _anthropic(f"/v1/messages/batches{path}", **{"typed": False, "statuses": (404,), **fields})
        for path, fields in _BATCHES
    ),
    _ollama(
        "/api/chat",
        handler=generation.chat,
        body=OllamaChatBody,
        reply=OllamaReply,
        stream=NDJSON,
        budgeted=True,
        field_names=_OLLAMA_CHAT_FIELD_NAMES,
    ),
    _ollama(
        "/api/generate",
        handler=generation.generate,
        body=OllamaGenerateBody,
        reply=OllamaReply,
        stream=NDJSON,
        budgeted=True,
        field_names=_OLLAMA_PROMPT_FIELD_NAMES,
    ),
    _ollama(
        "/api/embed",
        handler=ollama_embeddings.embed,
        body=OllamaEmbedBody,
        reply=OllamaEmbedReply,
        budgeted=True,
        field_names={"text": "input", "input_ids": "input"},
    ),
    _ollama(
        "/api/embeddings",
        handler=ollama_embeddings.embeddings,
        body=OllamaEmbeddingsBody,
        reply=OllamaEmbeddingsReply,
        budgeted=True,
        field_names={"text": "prompt", "input_ids": "prompt"},
    ),
    _ollama("/api/ps", handler=ollama_models.running, methods=GET, reply=OllamaTags),
    _ollama("/api/tags", handler=ollama_models.tags, methods=GET, reply=OllamaTags),
    _ollama(
        "/api/pull",
        handler=ollama_models.pull,
        body=OllamaPullBody,
        media_type="application/x-ndjson",
        statuses=(404,),
    ),
    _ollama(
        "/api/show",
        handler=ollama_models.show,
        body=OllamaShowBody,
        reply=OllamaShow,
        statuses=(404,),
    ),
    _ollama("/api/version", handler=ollama_models.version, methods=GET, reply=OllamaVersion),
    Endpoint(
        path="/vertex_generate",
        handler=cloud.vertex_generate,
        body=VertexBody,
        reply=VertexReply,
        tag="Cloud",
        field_names=grammars_in("parameters.sampling_params"),
        budgeted=True,
    ),
    opened(
        "/ping",
        handler=cloud.ping,
        media_type="",
        statuses=(503,),
        plain_statuses=(503,),
        tag="Cloud",
    ),
)

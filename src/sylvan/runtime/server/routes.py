"""The table of all routes. Those called most stand first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sylvan.api.errors import Family
from sylvan.api.native import (
    AbortBody,
    ContinueBody,
    ControlReplyBody,
    FlushQuery,
    GenerateBody,
    GenerateReplies,
    LoadsQuery,
    PauseBody,
)
from sylvan.api.openai.chat import ChatBody, ChatReply, RenderReply
from sylvan.api.openai.completions import CompletionBody, CompletionReply
from sylvan.api.openai.models import ModelCard, ModelList
from sylvan.api.tokens import DetokenizeBody, DetokenizeReply, TokenizeBody, TokenizeReply
from sylvan.runtime.server import pages
from sylvan.runtime.server.endpoint import Endpoint
from sylvan.runtime.server.native import control, generate, health, info, tokens
from sylvan.runtime.server.openai import chat, completions, models
from sylvan.runtime.server.security import Level

_OPENAI_SPELLING = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "top_logprobs_num": "top_logprobs",
}
_SSE = "text/event-stream"
_GET_POST = ("GET", "POST")


def _openai(path: str, **fields: Any) -> Endpoint:
    return Endpoint(**{"path": path, "family": Family.OPENAI, "tag": "OpenAI", **fields})


def _admin(path: str, **fields: Any) -> Endpoint:
    return Endpoint(**{"path": path, "level": Level.ADMIN_OPTIONAL, "tag": "Control", **fields})


def _open(path: str, **fields: Any) -> Endpoint:
    return Endpoint(**{"path": path, "level": Level.OPEN, "methods": ("GET",), **fields})


def _aliases(endpoint: Endpoint, *paths: str) -> tuple[Endpoint, ...]:
    return endpoint, *(replace(endpoint, path=path) for path in paths)


_OPENAI = (
    _openai(
        "/v1/chat/completions",
        handler=chat.chat,
        body=ChatBody,
        reply=ChatReply,
        stream=_SSE,
        typed=True,
        budgeted=True,
        spelling={"text": "messages", "input_ids": "messages", **_OPENAI_SPELLING},
    ),
    _openai(
        "/v1/completions",
        handler=completions.completions,
        body=CompletionBody,
        reply=CompletionReply,
        stream=_SSE,
        typed=True,
        budgeted=True,
        spelling={"text": "prompt", "input_ids": "prompt", **_OPENAI_SPELLING},
    ),
    _openai(
        "/v1/chat/render", handler=chat.render_chat, body=ChatBody, reply=RenderReply, typed=True
    ),
    _openai("/v1/models", handler=models.models, methods=("GET",), reply=ModelList),
    _openai(
        "/v1/models/{model:path}",
        handler=models.model,
        methods=("GET",),
        family=Family.RESPONSES,
        reply=ModelCard,
        statuses=(404,),
    ),
)

_NATIVE = (
    Endpoint(
        path="/generate",
        handler=generate.generate,
        methods=("POST", "PUT"),
        body=GenerateBody,
        reply=GenerateReplies,
        stream=_SSE,
        budgeted=True,
    ),
    *_aliases(
        Endpoint(
            path="/tokenize",
            handler=tokens.tokenize,
            body=TokenizeBody,
            reply=TokenizeReply,
            typed=True,
            family=Family.OPENAI,
        ),
        "/v1/tokenize",
    ),
    *_aliases(
        Endpoint(
            path="/detokenize",
            handler=tokens.detokenize,
            body=DetokenizeBody,
            reply=DetokenizeReply,
            typed=True,
            family=Family.OPENAI,
        ),
        "/v1/detokenize",
    ),
)

_HEALTH = (
    _open("/live", handler=health.live, media_type="", statuses=(503,), plain_statuses=(503,)),
    _open("/ready", handler=health.ready, media_type="", statuses=(503,), plain_statuses=(503,)),
    _open("/health", handler=health.health, media_type="", statuses=(503,), plain_statuses=(503,)),
    _open(
        "/health_generate",
        handler=health.health_generate,
        media_type="",
        statuses=(503,),
        plain_statuses=(503,),
    ),
)

_INFO = (
    *_aliases(
        Endpoint(path="/model_info", handler=info.model_info, methods=("GET",), tag="Info"),
        "/get_model_info",
    ),
    *_aliases(
        _admin("/server_info", handler=info.server_info, methods=("GET",), statuses=(503,)),
        "/get_server_info",
    ),
    Endpoint(path="/v1/loads", handler=info.loads, methods=("GET",), query=LoadsQuery, tag="Info"),
)

_CONTROL = (
    Endpoint(
        path="/abort_request",
        handler=control.abort_request,
        body=AbortBody,
        media_type="",
        tag="Control",
    ),
    _admin(
        "/flush_cache",
        handler=control.flush_cache,
        methods=_GET_POST,
        query=FlushQuery,
        media_type="text/plain",
        statuses=(503,),
    ),
    _admin(
        "/pause_generation",
        handler=control.pause_generation,
        body=PauseBody,
        body_optional=True,
        reply=ControlReplyBody,
    ),
    _admin(
        "/continue_generation",
        handler=control.continue_generation,
        body=ContinueBody,
        body_optional=True,
        reply=ControlReplyBody,
    ),
)

_PAGES = (
    Endpoint(
        path="/",
        handler=pages.home,
        methods=("GET", "HEAD"),
        level=Level.OPEN,
        media_type="text/plain",
        tag="Pages",
    ),
    _open("/docs", handler=pages.docs, media_type="text/html", tag="Pages"),
    _open("/docs/docs.js", handler=pages.docs_script, media_type="text/javascript", tag="Pages"),
    _open("/docs/style.css", handler=pages.docs_style, media_type="text/css", tag="Pages"),
    _open("/openapi.json", handler=pages.openapi_json, tag="Pages"),
)

ENDPOINTS: tuple[Endpoint, ...] = (*_OPENAI, *_NATIVE, *_HEALTH, *_INFO, *_CONTROL, *_PAGES)

"""The table of paths that are forwarded to workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sylvan.api.errors import Family
from sylvan.gateway.http import parsed_body
from sylvan.gateway.http.parsed_body import PromptOf

Spread = Literal["one", "all", "search", "tenant"]
"""Which workers get a request: the one that the policy selects; all; the one that stores the object
named in the path; the one that stores the tenant's objects."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProxyRoute:
    """A path that workers serve.

    Attributes:
        path: The path; a segment starting with `{` matches anything.
        methods: HTTP methods.
        family: API whose error format is used.
        spread: Which workers get it.
        prompt_of: Extracts the prompt from the body; None: the body is forwarded unparsed.
        streams: The answer is a stream unless the body says otherwise.
        prefix: Prefix of request IDs.
        operator: For operators only.
        pairs: Needs a prefill and a decode worker under disaggregation.
        form: The body is a form instead of JSON.
    """

    path: str
    methods: tuple[str, ...] = ("POST",)
    family: Family = Family.OPENAI
    spread: Spread = "one"
    prompt_of: PromptOf | None = None
    streams: bool = False
    prefix: str = "req-"
    operator: bool = False
    pairs: bool = False
    form: bool = False


_GENERATION = (
    ProxyRoute(
        path="/v1/chat/completions",
        prompt_of=parsed_body.conversation,
        prefix="chatcmpl-",
        pairs=True,
    ),
    ProxyRoute(
        path="/v1/completions", prompt_of=parsed_body.text("prompt"), prefix="cmpl-", pairs=True
    ),
    ProxyRoute(
        path="/generate",
        methods=("POST", "PUT"),
        family=Family.NATIVE,
        prompt_of=parsed_body.text("text", "input_ids"),
        prefix="gnt-",
        pairs=True,
    ),
    ProxyRoute(
        path="/v1/responses",
        family=Family.RESPONSES,
        prompt_of=parsed_body.responses,
        prefix="resp-",
        pairs=True,
    ),
    ProxyRoute(
        path="/v1/messages", family=Family.ANTHROPIC, prompt_of=parsed_body.conversation, pairs=True
    ),
    ProxyRoute(
        path="/api/chat",
        family=Family.OLLAMA,
        prompt_of=parsed_body.conversation,
        streams=True,
        pairs=True,
    ),
    ProxyRoute(
        path="/api/generate",
        family=Family.OLLAMA,
        prompt_of=parsed_body.text("prompt"),
        streams=True,
        pairs=True,
    ),
)


def _short(family: Family, *paths: str) -> tuple[ProxyRoute, ...]:
    """Make routes with short answers and without cached prompts."""
    return tuple(
        ProxyRoute(path=path, family=family, prompt_of=parsed_body.nothing) for path in paths
    )


_VECTORS = (
    *_short(Family.OPENAI, "/v1/embeddings", "/v1/classify", "/v1/score"),
    *(
        ProxyRoute(path=path, methods=("POST", "PUT"), prompt_of=parsed_body.nothing)
        for path in ("/v1/rerank", "/v2/rerank", "/rerank")
    ),
    *(
        ProxyRoute(
            path=path, methods=("POST", "PUT"), family=Family.NATIVE, prompt_of=parsed_body.nothing
        )
        for path in ("/encode", "/classify")
    ),
    *_short(Family.OLLAMA, "/api/embed", "/api/embeddings"),
)

AUDIO = tuple(
    ProxyRoute(path=f"/v1/audio/{name}", prompt_of=parsed_body.nothing, form=True)
    for name in ("transcriptions", "translations")
)

_TEXT = (
    *_short(Family.OPENAI, "/v1/chat/render", "/invocations"),
    *_short(Family.OPENAI, "/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize"),
    *_short(Family.NATIVE, "/parse_function_call", "/separate_reasoning", "/vertex_generate"),
    *_short(Family.ANTHROPIC, "/v1/messages/count_tokens"),
    *_short(Family.RESPONSES, "/v1/responses/input_tokens"),
    *_short(Family.OLLAMA, "/api/show"),
)

_MESSAGE_BATCHES: tuple[tuple[str, tuple[str, ...], Spread], ...] = (
    ("", ("GET", "POST"), "tenant"),
    ("/{id}", ("GET", "DELETE"), "search"),
    ("/{id}/cancel", ("POST",), "search"),
    ("/{id}/results", ("GET",), "search"),
)

_STORED = (
    ProxyRoute(
        path="/v1/responses/{id}",
        methods=("GET", "DELETE"),
        family=Family.RESPONSES,
        spread="search",
    ),
    ProxyRoute(path="/v1/responses/{id}/cancel", family=Family.RESPONSES, spread="search"),
    ProxyRoute(
        path="/v1/responses/{id}/input_items",
        methods=("GET",),
        family=Family.RESPONSES,
        spread="search",
    ),
    ProxyRoute(path="/v1/conversations", family=Family.RESPONSES, spread="tenant"),
    *(
        ProxyRoute(
            path="/v1/conversations/{conversation_id}" + path,
            methods=methods,
            family=Family.RESPONSES,
            spread="search",
        )
        for path, methods in (
            ("", ("GET", "POST", "DELETE")),
            ("/items", ("GET", "POST")),
            ("/items/{item_id}", ("GET", "DELETE")),
        )
    ),
    ProxyRoute(path="/v1/files", methods=("GET", "POST"), spread="tenant"),
    ProxyRoute(path="/v1/files/{id}", methods=("GET", "DELETE"), spread="search"),
    ProxyRoute(path="/v1/files/{id}/content", methods=("GET",), spread="search"),
    ProxyRoute(path="/v1/batches", methods=("GET", "POST"), spread="tenant"),
    ProxyRoute(path="/v1/batches/{id}", methods=("GET", "DELETE"), spread="search"),
    ProxyRoute(path="/v1/batches/{id}/cancel", spread="search"),
    *(
        ProxyRoute(
            path="/v1/messages/batches" + path,
            methods=methods,
            family=Family.ANTHROPIC,
            spread=spread,
        )
        for path, methods, spread in _MESSAGE_BATCHES
    ),
    ProxyRoute(
        path="/open_session", methods=("GET", "POST"), family=Family.NATIVE, spread="tenant"
    ),
    ProxyRoute(
        path="/close_session", methods=("GET", "POST"), family=Family.NATIVE, spread="tenant"
    ),
    ProxyRoute(path="/cache/explain", methods=("GET",), family=Family.NATIVE, spread="search"),
)


def _to_all(*paths: str) -> tuple[ProxyRoute, ...]:
    return tuple(
        ProxyRoute(
            path=path,
            methods=("GET", "POST"),
            family=Family.NATIVE,
            spread="all",
            operator=True,
        )
        for path in paths
    )


_CONTROL = (
    ProxyRoute(path="/abort_request", family=Family.NATIVE, spread="all"),
    *_to_all(
        "/flush_cache",
        "/pause_generation",
        "/continue_generation",
        "/freeze_gc",
        "/start_profile",
        "/stop_profile",
        "/release_memory_occupation",
        "/resume_memory_occupation",
        "/update_weights_from_disk",
        "/load_lora_adapter",
        "/unload_lora_adapter",
    ),
)

PASSED: tuple[ProxyRoute, ...] = (*_GENERATION, *_VECTORS, *AUDIO, *_TEXT, *_STORED, *_CONTROL)

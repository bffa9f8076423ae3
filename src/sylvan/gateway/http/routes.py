"""Paths that are passed on to workers, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sylvan.api.errors import Family
from sylvan.gateway.http import asked
from sylvan.gateway.http.asked import PromptOf

Spread = Literal["one", "all", "search", "tenant"]
"""Who gets a request: the worker that the policy chooses; all; whichever knows the thing that the
path names; the one that keeps what belongs to the tenant."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Passed:
    """A path that workers serve.

    Attributes:
        path: Of the first segments; what follows `{` stands for anything in one segment.
        methods: Of HTTP.
        family: Shape of errors.
        spread: Who gets it.
        prompt_of: Where the prompt is in the body; None: the body is passed on unread.
        streams: The answer is a stream unless the body says otherwise.
        prefix: How ids of requests begin.
        operator: For the operator only.
        pairs: Needs prefill and decode where these are apart.
        form: The body is a form, not JSON.
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
    Passed(
        path="/v1/chat/completions",
        prompt_of=asked.conversation,
        prefix="chatcmpl-",
        pairs=True,
    ),
    Passed(path="/v1/completions", prompt_of=asked.text("prompt"), prefix="cmpl-", pairs=True),
    Passed(
        path="/generate",
        methods=("POST", "PUT"),
        family=Family.NATIVE,
        prompt_of=asked.text("text", "input_ids"),
        prefix="gnt-",
        pairs=True,
    ),
    Passed(
        path="/v1/responses",
        family=Family.RESPONSES,
        prompt_of=asked.responses,
        prefix="resp-",
        pairs=True,
    ),
    Passed(path="/v1/messages", family=Family.ANTHROPIC, prompt_of=asked.conversation, pairs=True),
    Passed(
        path="/api/chat",
        family=Family.OLLAMA,
        prompt_of=asked.conversation,
        streams=True,
        pairs=True,
    ),
    Passed(
        path="/api/generate",
        family=Family.OLLAMA,
        prompt_of=asked.text("prompt"),
        streams=True,
        pairs=True,
    ),
)


def _short(family: Family, *paths: str) -> tuple[Passed, ...]:
    """Routes whose answers are short, and whose prompts are not cached."""
    return tuple(Passed(path=path, family=family, prompt_of=asked.nothing) for path in paths)


_VECTORS = (
    *_short(Family.OPENAI, "/v1/embeddings", "/v1/classify", "/v1/score"),
    *(
        Passed(path=path, methods=("POST", "PUT"), prompt_of=asked.nothing)
        for path in ("/v1/rerank", "/v2/rerank", "/rerank")
    ),
    *(
        Passed(path=path, methods=("POST", "PUT"), family=Family.NATIVE, prompt_of=asked.nothing)
        for path in ("/encode", "/classify")
    ),
    *_short(Family.OLLAMA, "/api/embed", "/api/embeddings"),
)

AUDIO = tuple(
    Passed(path=f"/v1/audio/{name}", prompt_of=asked.nothing, form=True)
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
    Passed(
        path="/v1/responses/{id}",
        methods=("GET", "DELETE"),
        family=Family.RESPONSES,
        spread="search",
    ),
    Passed(path="/v1/responses/{id}/cancel", family=Family.RESPONSES, spread="search"),
    Passed(
        path="/v1/responses/{id}/input_items",
        methods=("GET",),
        family=Family.RESPONSES,
        spread="search",
    ),
    Passed(path="/v1/conversations", family=Family.RESPONSES, spread="tenant"),
    *(
        Passed(
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
    Passed(path="/v1/files", methods=("GET", "POST"), spread="tenant"),
    Passed(path="/v1/files/{id}", methods=("GET", "DELETE"), spread="search"),
    Passed(path="/v1/files/{id}/content", methods=("GET",), spread="search"),
    Passed(path="/v1/batches", methods=("GET", "POST"), spread="tenant"),
    Passed(path="/v1/batches/{id}", methods=("GET", "DELETE"), spread="search"),
    Passed(path="/v1/batches/{id}/cancel", spread="search"),
    *(
        Passed(
            path="/v1/messages/batches" + path,
            methods=methods,
            family=Family.ANTHROPIC,
            spread=spread,
        )
        for path, methods, spread in _MESSAGE_BATCHES
    ),
    Passed(path="/open_session", methods=("GET", "POST"), family=Family.NATIVE, spread="tenant"),
    Passed(path="/close_session", methods=("GET", "POST"), family=Family.NATIVE, spread="tenant"),
    Passed(path="/cache/explain", methods=("GET",), family=Family.NATIVE, spread="search"),
)


def _to_all(*paths: str) -> tuple[Passed, ...]:
    return tuple(
        Passed(
            path=path,
            methods=("GET", "POST"),
            family=Family.NATIVE,
            spread="all",
            operator=True,
        )
        for path in paths
    )


_CONTROL = (
    Passed(path="/abort_request", family=Family.NATIVE, spread="all"),
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

PASSED: tuple[Passed, ...] = (*_GENERATION, *_VECTORS, *AUDIO, *_TEXT, *_STORED, *_CONTROL)

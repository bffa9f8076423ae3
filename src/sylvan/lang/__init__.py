"""Frontend language: programs that call language models, with control flow and shared prefixes.

A program is a function under `api.function`. What it appends to its state (`state.ProgramState`)
becomes nodes (`ir`), which `executor.StreamExecutor` runs in order on a backend (`backends`),
through `interpreter.Interpreter`. `tracer` records the nodes instead, to find the constant
prefix.
"""

from __future__ import annotations

import importlib
from typing import Any

from sylvan.lang.api import (
    assistant,
    assistant_begin,
    assistant_end,
    flush_cache,
    function,
    gen,
    gen_int,
    gen_string,
    get_server_info,
    image,
    select,
    separate_reasoning,
    set_default_backend,
    system,
    system_begin,
    system_end,
    user,
    user_begin,
    user_end,
    video,
)
from sylvan.lang.backends.runtime_endpoint import RuntimeEndpoint
from sylvan.lang.choices import (
    greedy_token_selection,
    token_length_normalized,
    unconditional_likelihood_normalized,
)
from sylvan.lang.errors import (
    BackendError,
    ProgramCancelledError,
    ProgramError,
    ProgramTimeoutError,
)
from sylvan.lang.settings import global_config
from sylvan.lang.state import ProgramState, ProgramStateGroup

# Loaded on first use: most programs need none of them, and the engine is the whole runtime.
_LAZY = {
    "Anthropic": "sylvan.lang.backends.anthropic",
    "Crusoe": "sylvan.lang.backends.crusoe",
    "Engine": "sylvan.runtime.engine.engine",
    "ServerArgs": "sylvan.runtime.engine.arguments",
    "LiteLLM": "sylvan.lang.backends.litellm",
    "OpenAI": "sylvan.lang.backends.openai",
    "Runtime": "sylvan.lang.backends.runtime",
    "Scripted": "sylvan.lang.backends.scripted",
    "VertexAI": "sylvan.lang.backends.vertexai",
}
Anthropic: Any
Crusoe: Any
Engine: Any
LiteLLM: Any
OpenAI: Any
Runtime: Any
Scripted: Any
VertexAI: Any

__all__ = [
    "Anthropic",
    "BackendError",
    "Crusoe",
    "Engine",
    "LiteLLM",
    "OpenAI",
    "ProgramCancelledError",
    "ProgramError",
    "ProgramState",
    "ProgramStateGroup",
    "ProgramTimeoutError",
    "Runtime",
    "RuntimeEndpoint",
    "Scripted",
    "VertexAI",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "flush_cache",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "get_server_info",
    "global_config",
    "greedy_token_selection",
    "image",
    "select",
    "separate_reasoning",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "token_length_normalized",
    "unconditional_likelihood_normalized",
    "user",
    "user_begin",
    "user_end",
    "video",
]


def __getattr__(name: str) -> Any:
    """Backends that need a provider's SDK, a process or an engine, imported when first used."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)

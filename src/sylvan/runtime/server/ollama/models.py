"""`/api/tags`, `/api/ps`, `/api/show` and `/api/version`."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any

from starlette.responses import Response

from sylvan.api.ollama import OllamaPullBody, OllamaShowBody
from sylvan.api.version import VERSION
from sylvan.runtime.server.adapters import asked_adapter
from sylvan.runtime.server.context import Context
from sylvan.runtime.server.endpoint import Call, NotFoundError, json_response
from sylvan.runtime.server.sse import line

_NEVER_S = 7258118400.0  # the year 2200; Ollama clients require a time


def timestamp(seconds: float) -> str:
    """Format a time as Ollama does."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


async def tags(call: Call[None]) -> Response:
    """List the models."""
    context = call.context
    adapters = context.engine.adapters.served(call.tenant.name)
    cards = [_card(context), *(_card(context, adapter.name) for adapter in adapters)]
    return json_response({"models": cards})


async def running(call: Call[None]) -> Response:
    """List the loaded models: the served one, which stays loaded."""
    context = call.context
    card = {
        **_card(context),
        "expires_at": timestamp(_NEVER_S),
        "size_vram": 0,
        "context_length": context.engine.facts.context_len,
    }
    return json_response({"models": [card]})


async def pull(call: Call[OllamaPullBody]) -> Response:
    """Confirm that a model is available, if it is the served one or one of its adapters.

    Raises:
        RequestError: It is another model; models are not downloaded.
    """
    name = call.body.model or call.body.name or ""
    served = call.context.settings.served_model_name
    if asked_adapter(call, name) is None and name.removesuffix(":latest") != served:
        raise NotFoundError(f"model {name[:200]!r} is not here, and models are not pulled.")
    if call.body.stream is False:
        return json_response({"status": "success"})
    lines = b"".join(line({"status": status}) for status in ("pulling manifest", "success"))
    return Response(lines, 200, None, "application/x-ndjson")


async def show(call: Call[OllamaShowBody]) -> Response:
    """Describe one model."""
    context = call.context
    name = call.body.model or call.body.name or ""
    served = context.settings.served_model_name
    adapter = asked_adapter(call, name)
    if adapter is None and name.removesuffix(":latest") != served:
        raise NotFoundError(f"model {name[:200]!r} not found")
    facts, parsers = context.engine.facts, context.parsers
    can = {
        "completion": facts.is_generation,
        "embedding": facts.embeds,
        "tools": facts.is_generation and parsers.tools is not None,
        "thinking": facts.is_generation and parsers.reasoning is not None,
    }
    return json_response(
        {
            "license": "",
            "modelfile": f"FROM {served}\n",
            "parameters": "",
            "template": context.engine.tokenizer.chat_template or "",
            "modified_at": timestamp(context.started),
            "details": _details(context, adapter),
            "model_info": {
                "general.architecture": facts.model_type,
                f"{facts.model_type or 'model'}.context_length": facts.context_len,
                f"{facts.model_type or 'model'}.vocab_size": facts.vocab_size,
            },
            "capabilities": [name for name, is_there in can.items() if is_there],
        }
    )


async def version(call: Call[None]) -> Response:
    """The version of this server."""
    return json_response({"version": VERSION})


def _card(context: Context, adapter: str | None = None) -> dict[str, Any]:
    name = adapter or context.settings.served_model_name
    return {
        "name": name,
        "model": name,
        "modified_at": timestamp(context.started),
        "size": 0,
        "digest": hashlib.sha256(context.engine.facts.model_path.encode()).hexdigest(),
        "details": _details(context, adapter),
    }


def _details(context: Context, adapter: str | None = None) -> dict[str, Any]:
    family = context.engine.facts.model_type
    return {
        "parent_model": context.settings.served_model_name if adapter else "",
        "format": "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": "",
    }

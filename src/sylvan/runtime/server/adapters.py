"""Resolves LoRA adapters from the model names that clients send."""

from __future__ import annotations

from typing import Any

from sylvan.api.openai.common import GenerationBody
from sylvan.runtime.server.context import Context
from sylvan.runtime.server.endpoint import Call


def adapter_named(context: Context, model: str | None, tenant: str) -> str | None:
    """Return the adapter that a model name refers to: the adapter's name, or `base:adapter`.

    None if no adapter has that name, because clients may use any model name.
    """
    adapters = context.engine.adapters
    names = (model, (model or "").partition(":")[2])
    return next((name for name in names if name and adapters.find(name, tenant)), None)


def asked_adapter(call: Call[Any], model: str | None) -> str | None:
    """Apply `adapter_named` to a call."""
    return adapter_named(call.context, model, call.tenant.name)


def adapter_of(call: Call[Any], body: GenerationBody) -> str | None:
    """Return the adapter that a body requests, in `lora_path` or in `model`.

    The part after a colon must be an adapter; an unknown adapter fails when it is used.
    """
    if body.lora_path:
        return body.lora_path
    if (found := asked_adapter(call, body.model)) is not None:
        return found
    _, colon, adapter = (body.model or "").partition(":")
    return adapter if colon and adapter else None

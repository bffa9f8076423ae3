"""Adapters by the names that clients give to models."""

from __future__ import annotations

from typing import Any

from sylvan.api.openai.common import GenerationBody
from sylvan.runtime.server.context import Context
from sylvan.runtime.server.endpoint import Call


def adapter_named(context: Context, model: str | None, tenant: str) -> str | None:
    """The adapter that a model's name means: its own name, or `base:adapter`.

    None where no adapter has that name, for clients that name models as they like.
    """
    adapters = context.engine.adapters
    names = (model, (model or "").partition(":")[2])
    return next((name for name in names if name and adapters.find(name, tenant)), None)


def asked_adapter(call: Call[Any], model: str | None) -> str | None:
    """As `adapter_named`, for a call."""
    return adapter_named(call.context, model, call.tenant.name)


def adapter_of(call: Call[Any], body: GenerationBody) -> str | None:
    """The adapter that a body asks for, as `lora_path`, or by its model.

    What follows a colon must be an adapter: one that is not there fails when it is asked for.
    """
    if body.lora_path:
        return body.lora_path
    if (found := asked_adapter(call, body.model)) is not None:
        return found
    _, colon, adapter = (body.model or "").partition(":")
    return adapter if colon and adapter else None

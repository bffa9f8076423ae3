"""Routes of models that encode: embeddings, classes, rankings.

The served models generate text; a request for a vector is of the wrong kind.
"""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from sylvan.protocol.errors import RequestError
from sylvan.runtime.server.endpoint import Call


async def embeddings(call: Call[Any]) -> Response:
    """Vectors of texts."""
    raise _wrong_kind(call, "embeddings")


async def classify(call: Call[Any]) -> Response:
    """Classes of texts."""
    raise _wrong_kind(call, "classes")


async def rerank(call: Call[Any]) -> Response:
    """Documents in the order of their relevance."""
    raise _wrong_kind(call, "rankings")


async def encode(call: Call[Any]) -> Response:
    """Vectors of texts, in the native shape."""
    raise _wrong_kind(call, "embeddings")


def _wrong_kind(call: Call[Any], wanted: str) -> RequestError:
    name = call.context.settings.served_model_name
    return RequestError(f"The model {name!r} generates text; it makes no {wanted}.", param="model")


async def transcriptions(call: Call[Any]) -> Response:
    """Text of speech; needs a model that hears."""
    message = "This model takes text only; transcription needs a model that hears."
    raise RequestError(message, status=501)

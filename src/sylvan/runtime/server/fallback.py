"""Matches paths with variable parts, and answers for paths that nothing serves."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from sylvan.api.errors import Family, error_body
from sylvan.api.version import VERSION
from sylvan.runtime.server.endpoint import INTERNAL_ERROR, Routes, json_response

_FAMILIES = (
    ("/v1/messages", Family.ANTHROPIC),
    ("/v1/responses", Family.RESPONSES),
    ("/v1/", Family.OPENAI),
    ("/api/", Family.OLLAMA),
)


def fallback_app(routes: Routes, root_path: str, openapi: Callable[[], dict[str, Any]]) -> FastAPI:
    """Build the application of a table of routes.

    Args:
        routes: Endpoints and their handlers.
        root_path: Prefix of all paths.
        openapi: Describes the API.
    """
    api = FastAPI(
        title="Sylvan",
        version=VERSION,
        root_path=root_path,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    api.openapi = openapi  # type: ignore[method-assign]
    for endpoint, handle in routes:
        api.add_route(endpoint.path, handle, methods=list(endpoint.methods))
    api.add_exception_handler(HTTPException, _http_error)  # type: ignore[arg-type]
    api.add_exception_handler(Exception, _crash)
    return api


def _http_error(request: Request, error: HTTPException) -> Response:
    """Answer an unknown path or method."""
    status = error.status_code
    kind = str(status) if _family(request.url.path) is Family.OPENAI else None
    message = f"{HTTPStatus(status).phrase}: {request.method} {request.url.path[:200]}"
    content = error_body(_family(request.url.path), status, message, kind=kind)
    return json_response(content, status=status, headers=dict(error.headers or {}))


def _crash(request: Request, error: Exception) -> Response:
    """Answer an internal error; details go to the log only."""
    content: Any = error_body(_family(request.url.path), 500, INTERNAL_ERROR)
    return json_response(content, status=500)


def _family(path: str) -> Family:
    return next((family for prefix, family in _FAMILIES if path.startswith(prefix)), Family.NATIVE)

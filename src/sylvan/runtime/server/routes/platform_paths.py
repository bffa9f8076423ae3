"""Additional paths of routes, from environment variables of platforms.

Vertex AI passes the paths that it will call to the container; Ollama's routes can be moved as in
SGLang. The usual path stays available.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from sylvan.config.env import variable
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.server.endpoint import Endpoint

VARIABLES = {
    "AIP_PREDICT_ROUTE": "/vertex_generate",
    "AIP_HEALTH_ROUTE": "/health",
    "SGLANG_OLLAMA_CHAT_ROUTE": "/api/chat",
    "SGLANG_OLLAMA_GENERATE_ROUTE": "/api/generate",
    "SGLANG_OLLAMA_TAGS_ROUTE": "/api/tags",
    "SGLANG_OLLAMA_SHOW_ROUTE": "/api/show",
    "SGLANG_OLLAMA_ROOT_ROUTE": "/",
}


def with_other_paths(
    table: Sequence[Endpoint], lookup: Callable[[str], str | None] = variable
) -> tuple[Endpoint, ...]:
    """Return the table, plus its routes under the paths in environment variables.

    Raises:
        ConfigError: A variable holds no valid path, or the path of another route.
    """
    paths = {endpoint.path: endpoint for endpoint in table}
    found: list[Endpoint] = []
    for name, usual in VARIABLES.items():
        path = lookup(name)
        if not path or path == usual:
            continue
        if not path.startswith("/") or "{" in path:
            raise ConfigError(f"{name}: a path begins with a slash, {path!r} does not serve")
        if path in paths:
            raise ConfigError(f"{name}: {path!r} is a route of its own")
        paths[path] = replace(paths[usual], path=path)
        found.append(paths[path])
    return (*table, *found)

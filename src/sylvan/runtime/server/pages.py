"""Web pages: the home page, the API documentation (works offline), and the UI."""

from __future__ import annotations

import html
from importlib.resources import files

from starlette.responses import RedirectResponse, Response

from sylvan.api.version import VERSION
from sylvan.runtime.server.endpoint import Call, NotFoundError, json_response, text_response
from sylvan.ui.files import INDEX, page_file
from sylvan.utils.threads import call_in_thread

_LINKS = (
    ("/ui", "a page to talk to the model and to see what the server does"),
    ("/docs", "every route, with its fields"),
    ("/openapi.json", "the same for programs"),
    ("/metrics", "numbers for Prometheus"),
)
_HOME = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Sylvan</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="stylesheet" href="/docs/style.css"></head>
<body><main><h1>Sylvan {version}</h1>
<p>This server runs and serves <b>{model}</b>.</p><ul>{links}</ul>
<pre>{example}</pre></main></body></html>
"""


async def home(call: Call[None]) -> Response:
    """Serve the home page."""
    request, settings = call.request, call.context.settings
    example = _example(str(request.base_url).rstrip("/"), settings.served_model_name)
    if "text/html" not in request.headers.get("accept", ""):
        lines = "".join(f"  {path:14} {what}\n" for path, what in _LINKS)
        head = f"Sylvan {VERSION} runs and serves {settings.served_model_name}.\n\n"
        return text_response(f"{head}{lines}\n{example}\n")
    links = "".join(f'<li><a href="{path}">{path}</a>: {what}</li>' for path, what in _LINKS)
    page = _HOME.format(
        version=VERSION,
        model=html.escape(settings.served_model_name),
        links=links,
        example=html.escape(example),
    )
    return _page(page, "text/html")


async def openapi_json(call: Call[None]) -> Response:
    """Serve the OpenAPI document."""
    return json_response(await call_in_thread(call.request.app.openapi))


async def docs(call: Call[None]) -> Response:
    """Serve the API documentation; needs no network."""
    return _page(_asset("docs.html"), "text/html")


async def docs_script(call: Call[None]) -> Response:
    """Serve the script that renders `/openapi.json`."""
    return _page(_asset("docs.js"), "text/javascript")


async def docs_style(call: Call[None]) -> Response:
    """Serve the style sheet."""
    return _page(_asset("style.css"), "text/css")


async def ui(call: Call[None]) -> Response:
    """Serve the web UI: playground, dashboard, cache and requests."""
    return _ui_file(call, INDEX)


async def ui_file(call: Call[None]) -> Response:
    """Serve a script, style sheet or picture of the web UI."""
    name = call.request.path_params["name"]
    if name in ("", INDEX):  # links in the page are relative to `/ui`
        return RedirectResponse("../ui", 308)
    return _ui_file(call, name)


def _ui_file(call: Call[None], name: str) -> Response:
    file = page_file(name, "server")
    if file is None:
        raise NotFoundError(f"The page has no file {name[:80]!r}.")
    if file.is_known(call.request.headers.get("if-none-match")):
        return Response(None, 304, dict(file.headers))
    return Response(file.body, 200, dict(file.headers))


def _page(content: str, kind: str) -> Response:
    headers = {
        "content-security-policy": "default-src 'self'; base-uri 'none'; frame-ancestors 'none'",
        "x-content-type-options": "nosniff",
    }
    return Response(content, 200, headers, f"{kind}; charset=utf-8")


def _asset(name: str) -> str:
    return (files("sylvan.runtime.server") / "assets" / name).read_text("utf-8")


def _example(base: str, model: str) -> str:
    return (
        f"curl {base}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f'  -d \'{{"model": "{model}", "messages": '
        '[{"role": "user", "content": "Hello! Who are you?"}]}\''
    )

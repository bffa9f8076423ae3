"""The web UI of the gateway."""

from __future__ import annotations

from sylvan.gateway.control.api import OwnRoute, Params
from sylvan.gateway.http.caller import Caller
from sylvan.protocol.errors import RequestError
from sylvan.ui.files import INDEX, page_file


async def index(caller: Caller, params: Params) -> None:
    """Serve the page."""
    await _send(caller, INDEX)


async def file(caller: Caller, params: Params) -> None:
    """Serve a script, style sheet or picture of the page."""
    if params["name"] == INDEX:  # the links in the page are relative to `/ui`
        await slash(caller, params)
    else:
        await _send(caller, params["name"])


async def slash(caller: Caller, params: Params) -> None:
    """Redirect to `/ui`, to which the links in the page are relative."""
    await caller.reply(308, (("location", "../ui"),), b"")


async def _send(caller: Caller, name: str) -> None:
    found = page_file(name, "gateway")
    if found is None:
        raise RequestError(f"The page has no file {name[:80]!r}.", status=404)
    headers = tuple(found.headers.items())
    if found.is_known(caller.headers.get("if-none-match")):
        await caller.start(304, headers)
        await caller.write(b"", more=False)
    else:
        await caller.reply(200, headers, found.body)


PAGE = (
    OwnRoute(path="/ui", handler=index, level="open"),
    OwnRoute(path="/ui/", handler=slash, level="open"),
    OwnRoute(path="/ui/{name}", handler=file, level="open"),
)

"""The web page of the gateway."""

from __future__ import annotations

from sylvan.gateway.control.api import Own, Params
from sylvan.gateway.http.caller import Caller
from sylvan.protocol.errors import RequestError
from sylvan.ui.files import INDEX, page_file


async def index(caller: Caller, params: Params) -> None:
    """The page."""
    await _send(caller, INDEX)


async def file(caller: Caller, params: Params) -> None:
    """A script, style sheet or picture of the page."""
    if params["name"] == INDEX:  # its links lead on from `/ui`
        await slash(caller, params)
    else:
        await _send(caller, params["name"])


async def slash(caller: Caller, params: Params) -> None:
    """Leads to `/ui`, from where the links of the page lead on."""
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
    Own(path="/ui", handler=index, level="open"),
    Own(path="/ui/", handler=slash, level="open"),
    Own(path="/ui/{name}", handler=file, level="open"),
)

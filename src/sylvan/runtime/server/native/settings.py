"""Routes with which operators change settings at run time."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from sylvan.api.live import DryRunQuery, RevertBody, SettingsBody
from sylvan.config.fields import get
from sylvan.config.live import LiveSettings
from sylvan.config.tree import Config
from sylvan.protocol.errors import ConfigError, RequestError
from sylvan.runtime.server.endpoint import Call, json_response


async def show(call: Call[None]) -> Response:
    """Return the settings that can change, and the journal of changes since start-up."""
    live = _live(call)
    values = {path: live.shown(path, get(live.now, path)) for path in live.live}
    return json_response({"settings": values, "journal": [entry.shown for entry in live.journal]})


async def change(call: Call[SettingsBody]) -> Response:
    """Change settings; all of them or none."""
    query: DryRunQuery = call.query
    tree = {**call.body.model_dump(exclude_unset=True), **(call.body.model_extra or {})}
    if not tree:
        raise RequestError("There is nothing to change: give sections and their fields.")
    return _done(call, lambda live: live.change(tree, "PATCH /config", dry_run=query.dry_run))


async def reload(call: Call[None]) -> Response:
    """Reload the configuration and key files, as SIGHUP does."""
    query: DryRunQuery = call.query
    return _done(call, lambda live: live.reread("POST /config/reload", dry_run=query.dry_run))


async def revert(call: Call[RevertBody]) -> Response:
    """Restore the settings as they were after a journal entry."""
    query: DryRunQuery = call.query
    to = call.body.to
    cause = f"POST /config/revert to {to}"
    return _done(call, lambda live: live.revert(to, cause, dry_run=query.dry_run))


def _done(call: Call[Any], do: Any) -> Response:
    query: DryRunQuery = call.query
    try:
        entry = do(_live(call))
    except ConfigError as error:
        raise RequestError(str(error)) from error
    return json_response({"dry_run": query.dry_run, **entry.shown})


def _live(call: Call[Any]) -> LiveSettings[Config]:
    live = call.context.live
    if live is None:
        raise RequestError("The settings of this server cannot change at run time.", status=501)
    return live

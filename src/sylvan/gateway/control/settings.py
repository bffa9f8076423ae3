"""`/config`: settings that operators change at run time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

import msgspec

from sylvan.config.fields import get
from sylvan.config.live import LiveSettings, SettingsChange
from sylvan.config.route import RouteConfig
from sylvan.gateway.control.api import OwnRoute, Params
from sylvan.gateway.control.bodies import decoded
from sylvan.gateway.http.caller import Caller
from sylvan.protocol.errors import ConfigError, RequestError

MAX_BODY_BYTES = 1 << 20
_WORDS = {"true": True, "1": True, "false": False, "0": False}


class _Revert(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    to: int


@dataclass(frozen=True, slots=True)
class SettingsRoutes:
    """Shows, changes and reverts run-time settings, with the same routes as a server."""

    live: LiveSettings[RouteConfig]

    @property
    def routes(self) -> tuple[OwnRoute, ...]:
        """Return the routes."""
        post = ("POST",)
        return (
            OwnRoute(path="/config", handler=self.show, level="operator"),
            OwnRoute(path="/config", handler=self.change, methods=("PATCH",), level="operator"),
            OwnRoute(path="/config/reload", handler=self.reload, methods=post, level="operator"),
            OwnRoute(path="/config/revert", handler=self.revert, methods=post, level="operator"),
        )

    async def show(self, caller: Caller, params: Params) -> None:
        """Return the settings that can change, and the journal of changes since start-up."""
        live = self.live
        values = {path: live.shown(path, get(live.now, path)) for path in live.live}
        journal = [entry.shown for entry in live.journal]
        await caller.reply_json({"settings": values, "journal": journal})

    async def change(self, caller: Caller, params: Params) -> None:
        """Change settings; all of them or none."""
        tree = decoded(await caller.body(MAX_BODY_BYTES), dict[str, Any])
        if not tree:
            raise RequestError("There is nothing to change: give sections and their fields.")
        dry = _dry_run(caller)
        await self._done(caller, dry, lambda: self.live.change(tree, "PATCH /config", dry_run=dry))

    async def reload(self, caller: Caller, params: Params) -> None:
        """Reload the configuration and key files, as SIGHUP does."""
        dry = _dry_run(caller)
        cause = "POST /config/reload"
        await self._done(caller, dry, lambda: self.live.reread(cause, dry_run=dry))

    async def revert(self, caller: Caller, params: Params) -> None:
        """Restore the settings as they were after a journal entry."""
        to = decoded(await caller.body(MAX_BODY_BYTES), _Revert).to
        dry, cause = _dry_run(caller), f"POST /config/revert to {to}"
        await self._done(caller, dry, lambda: self.live.revert(to, cause, dry_run=dry))

    async def _done(self, caller: Caller, dry: bool, do: Callable[[], SettingsChange]) -> None:
        try:
            entry = do()
        except ConfigError as error:
            raise RequestError(str(error)) from error
        await caller.reply_json({"dry_run": dry, **entry.shown})


def _dry_run(caller: Caller) -> bool:
    given = parse_qs(caller.query).get("dry_run", ["false"])[-1].lower()
    if given not in _WORDS:
        raise RequestError(f"dry_run: expected true | false, got {given[:40]!r}.", param="dry_run")
    return _WORDS[given]

"""Which store is attached: opened and closed at run time, by commands."""

from __future__ import annotations

import hashlib
import secrets
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from sylvan.protocol.errors import ConfigError, RequestError
from sylvan.protocol.messages import ControlReply
from sylvan.protocol.tiers import (
    AttachStore,
    ClearStore,
    DescribeTiers,
    DetachStore,
    TierCommand,
    TierLoad,
)
from sylvan.runtime.features.tiers.keys import PageNames
from sylvan.runtime.features.tiers.tier import StorageTier
from sylvan.runtime.features.tiers.work import Attached, Cleared, Event, StoreSpec
from sylvan.runtime.storage.api import StoreLimits
from sylvan.runtime.storage.find import check_url, shown
from sylvan.runtime.storage.manifest import decode_manifest

Describe = Callable[[], Mapping[str, Any]]


class Stores:
    """Opens and closes the store, one command at a time.

    Args:
        tier: The store tier; open while a store is attached.
        spec: Limits, manifest and key of later stores; its URL takes effect with `opened`.
    """

    def __init__(self, tier: StorageTier, spec: StoreSpec) -> None:
        self.tier, self._spec = tier, spec
        self._url = ""  # of the attached store
        self._commands: deque[tuple[int, TierCommand]] = deque()
        self._running: tuple[int, TierCommand] | None = None
        self._replies: list[ControlReply] = []
        self._closing = self._detach = self._clear = False
        self._attach: StoreSpec | None = None
        self.describe: Describe = dict
        self.load: Callable[[], TierLoad] = TierLoad
        self.configure: Callable[[AttachStore], None] = lambda command: None

    @property
    def url(self) -> str:
        """URL of the attached store; empty if there is none."""
        return self._url

    @property
    def waits(self) -> bool:
        """Whether there is work to send, or a report outstanding."""
        pending = self._attach is not None or self._detach or self._clear
        return pending or self._closing or self._running is not None or bool(self._commands)

    def opened(self, spec: StoreSpec) -> None:
        """Record that the worker half opened that store."""
        self._spec, self._url = spec, spec.url
        identity = identity_of(spec)
        self.tier.open(PageNames(identity, self.tier.layout.page_size))

    def add(self, number: int, command: TierCommand) -> None:
        """Queue a command."""
        self._commands.append((number, command))

    def take_replies(self) -> Sequence[ControlReply]:
        """Return the replies of finished commands; start the next one."""
        while self._running is None and self._commands:
            number, command = self._commands.popleft()
            try:
                done = self._begin(number, command)
            except ConfigError as error:
                self._reply(number, str(error))
            except RequestError as error:
                self._reply(number, str(error), error.status)
            else:
                if done:
                    self._reply(number)
        replies, self._replies = self._replies, []
        return replies

    def weights_changed(self) -> None:
        """Weights changed: pages stored so far will not be found any more."""
        self._spec = msgspec.structs.replace(self._spec, epoch=secrets.token_hex(16))
        if self._url:
            self._closing, self._attach = True, self._spec

    # ---- used by the control half

    def take_closing(self) -> bool:
        """Return whether the tree must drop the store now."""
        closing, self._closing = self._closing, False
        return closing

    def take(self) -> Mapping[str, Any]:
        """Return what to send, as fields of `TiersWork`."""
        found = {"attach": self._attach, "detach": self._detach, "clear": self._clear}
        if self._detach and self._running is not None:
            number, self._running = self._running[0], None
            self._url = ""
            self._reply(number)
        self._attach, self._detach, self._clear = None, False, False
        return found

    def on_event(self, event: Event) -> None:
        """Record that the worker half opened or emptied a store, or failed."""
        match event:
            case Attached():
                self._on_attached(event)
            case Cleared():
                self._on_cleared(event)
            case _:
                raise AssertionError(event)

    # ---- inside

    def _begin(self, number: int, command: TierCommand) -> bool:
        """Start a command; return whether it is already done."""
        match command:
            case DescribeTiers():
                return True
            case AttachStore():
                self._check_attach(command)
                self._running = number, command
                self._attach = spec_for(command, self._spec)
                return False
            case DetachStore() | ClearStore():
                if not self._url:
                    raise RequestError("there is no store; attach one first")
                self._running = number, command
                self._closing = True
                self._detach = isinstance(command, DetachStore)
                self._clear = not self._detach
                return False

    def _check_attach(self, command: AttachStore) -> None:
        if self._url:
            raise RequestError(f"{shown(self._url)} is attached; detach it first")
        spec = spec_for(command, self._spec)
        check_url(spec.url, limits_of(spec))

    def _on_attached(self, event: Attached) -> None:
        running = self._running
        if event.error:
            self._url = ""
        elif running is not None and isinstance(running[1], AttachStore):
            self.opened(spec_for(running[1], self._spec))
            self.configure(running[1])
        else:
            self.opened(msgspec.structs.replace(self._spec, url=event.url))
        if running is not None and isinstance(running[1], AttachStore):
            self._running = None
            self._reply(running[0], event.error, event.status)

    def _on_cleared(self, event: Cleared) -> None:
        assert self._running is not None
        (number, _), self._running = self._running, None
        if self._url:
            self.opened(self._spec)
        self._reply(number, event.error, 503)

    def _reply(self, number: int, error: str = "", status: int = 400) -> None:
        body = None if error else dict(self.describe())
        self._replies.append(
            ControlReply(id=number, ok=not error, message=error, status=status, body=body)
        )


def spec_for(command: AttachStore, before: StoreSpec) -> StoreSpec:
    """Return the store that a command names, with the limits of `before` as defaults."""
    given = {
        "max_bytes": command.max_bytes,
        "space_bytes": command.namespace_bytes,
        "ttl_s": command.ttl_s,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    url = before.default_url if command.url == "file" else command.url
    return msgspec.structs.replace(before, url=url, **changes)


def limits_of(spec: StoreSpec) -> StoreLimits:
    """Return the limits of a store."""
    return StoreLimits(max_bytes=spec.max_bytes, space_bytes=spec.space_bytes, ttl_s=spec.ttl_s)


def identity_of(spec: StoreSpec) -> bytes:
    """Return what separates pages of this manifest and epoch from others."""
    identity = decode_manifest(spec.manifest).identity
    return hashlib.sha256(identity + spec.epoch.encode()).digest() if spec.epoch else identity

"""Settings that change while a server runs, with a journal and rollback.

All parts that read the settings prepare a change before it takes effect on any of them, so that a
change that one of them rejects has no effect.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic

from sylvan.config.fields import get, nearest, replaced
from sylvan.config.load import flatten
from sylvan.config.parse import parse
from sylvan.config.schema import Root, Schema
from sylvan.protocol.errors import ConfigError

KEPT_ENTRIES = 256

Part = Callable[[Any], Callable[[], None]]
"""Checks a tree of settings and returns a function that applies it; raises `ConfigError`."""


@dataclass(frozen=True, slots=True)
class Change:
    """A setting before and after."""

    path: str
    old: object
    new: object


@dataclass(frozen=True, slots=True)
class SettingsChange:
    """An entry of the journal.

    Attributes:
        number: Counts from 1.
        at: Unix time.
        cause: Who or what requested the change.
        changes: Changed settings; empty if only files that they name were reloaded.
        restart: Settings that differ from the running server's and need a restart.
    """

    number: int
    at: float
    cause: str
    changes: tuple[Change, ...]
    restart: tuple[str, ...] = ()

    @property
    def shown(self) -> dict[str, Any]:
        """The entry as JSON-compatible data."""
        return asdict(self)


class LiveSettings(Generic[Root]):
    """The settings of a running server.

    Args:
        schema: Schema of the tree.
        config: The tree at the start, as given, before resolving.
        live: Paths of settings that can change.
        read: Reads all sources again.
        wall: Wall clock, in seconds since the Unix epoch.
    """

    def __init__(
        self,
        schema: Schema[Root],
        config: Root,
        live: Collection[str],
        read: Callable[[], Root],
        wall: Callable[[], float],
    ) -> None:
        self._schema = schema
        self._live = frozenset(live)
        self._read = read
        self._wall = wall
        self._parts: list[Part] = []
        self._now = config
        self._number = 0
        self._states: dict[int, Root] = {0: config}
        self._journal: deque[SettingsChange] = deque(maxlen=KEPT_ENTRIES)

    @property
    def now(self) -> Root:
        """The current tree."""
        return self._now

    @property
    def live(self) -> Collection[str]:
        """Paths of settings that can change, in the order of the tree."""
        return [path for path in self._schema.fields if path in self._live]

    @property
    def journal(self) -> Sequence[SettingsChange]:
        """The newest entries, oldest first."""
        return tuple(self._journal)

    def add(self, part: Part) -> None:
        """Register a part that applies changes."""
        self._parts.append(part)

    def change(
        self, tree: Mapping[str, object], cause: str, *, dry_run: bool = False
    ) -> SettingsChange:
        """Change the settings in `tree`: sections and fields, as in a configuration file.

        Raises:
            ConfigError: a setting does not exist, cannot change, or has an invalid value; one line
                for each. Nothing has changed.
        """
        values: dict[str, object] = {}
        lines: list[str] = []
        fields = self._schema.fields
        for path, raw in flatten(tree, schema=self._schema):
            if path not in fields:
                lines.append(f"{path}: no such setting{nearest(path, self._live)}")
            elif path not in self._live:
                lines.append(f"{path}: cannot change while the server runs; restart it")
            else:
                try:
                    values[path] = parse(fields[path], raw)
                except ValueError as error:
                    lines.append(f"{path}: {error}")
        if lines:
            raise ConfigError("\n".join(lines))
        return self._take(replaced(self._now, values), cause, dry_run=dry_run)

    def reread(self, cause: str, *, dry_run: bool = False) -> SettingsChange:
        """Read all sources again, and apply what can change.

        Raises:
            ConfigError: the sources are invalid. Nothing has changed.
        """
        found, start = self._read(), self._states[0]
        values = {path: get(found, path) for path in self._live}
        restart = tuple(
            path
            for path in self._schema.fields
            if path not in self._live and get(found, path) != get(start, path)
        )
        return self._take(replaced(self._now, values), cause, dry_run=dry_run, restart=restart)

    def revert(self, number: int, cause: str, *, dry_run: bool = False) -> SettingsChange:
        """Restore the settings after an entry of the journal; 0: those of the start.

        Raises:
            ConfigError: the entry is not in the journal, or a file it names is unreadable now.
        """
        if number not in self._states:
            raise ConfigError(f"to: entry {number} is not in the journal")
        return self._take(self._states[number], cause, dry_run=dry_run)

    def shown(self, path: str, value: object) -> object:
        """A value for display: secrets are hidden."""
        return "***" if self._schema.fields[path].is_secret and value else value

    def _take(
        self, wanted: Root, cause: str, *, dry_run: bool, restart: tuple[str, ...] = ()
    ) -> SettingsChange:
        changes = tuple(
            Change(path, self.shown(path, old), self.shown(path, new))
            for path in self.live
            if (old := get(self._now, path)) != (new := get(wanted, path))
        )
        effects = [part(wanted) for part in self._parts]
        entry = SettingsChange(self._number + 1, self._wall(), cause, changes, restart)
        if dry_run:
            return entry
        for effect in effects:
            effect()
        self._now, self._number = wanted, entry.number
        self._states[entry.number] = wanted
        self._journal.append(entry)
        for gone in [n for n in self._states if 0 < n <= self._number - KEPT_ENTRIES]:
            del self._states[gone]
        return entry

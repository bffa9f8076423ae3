"""Settings that change while a server runs, with a journal and a way back.

A change is prepared by all parts that read the settings before it takes effect on any of them, so
that one that cannot be changes nothing.
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
"""Checks a tree of settings, and returns what makes it take effect; raises `ConfigError`."""


@dataclass(frozen=True, slots=True)
class Change:
    """A setting before and after."""

    path: str
    old: object
    new: object


@dataclass(frozen=True, slots=True)
class SettingsChange:
    """One line of the journal.

    Attributes:
        number: Counts from 1.
        at: Unix time.
        cause: Who or what asked.
        changes: Of settings; empty if files that they name were read again, and no more.
        restart: Settings that differ from those of the start, and need a new one.
    """

    number: int
    at: float
    cause: str
    changes: tuple[Change, ...]
    restart: tuple[str, ...] = ()

    @property
    def shown(self) -> dict[str, Any]:
        """For people, as JSON can hold it."""
        return asdict(self)


class LiveSettings(Generic[Root]):
    """The settings of a server that runs.

    Args:
        schema: What kind of tree it is.
        config: The tree at the start, as it was given: not resolved.
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
        """The tree, as it is in force."""
        return self._now

    @property
    def live(self) -> Collection[str]:
        """Paths of settings that can change, in the order of the tree."""
        return [path for path in self._schema.fields if path in self._live]

    @property
    def journal(self) -> Sequence[SettingsChange]:
        """The newest entries, the oldest first."""
        return tuple(self._journal)

    def add(self, part: Part) -> None:
        """Have one more part take changes."""
        self._parts.append(part)

    def change(
        self, tree: Mapping[str, object], cause: str, *, dry_run: bool = False
    ) -> SettingsChange:
        """Set what `tree` has: sections and fields, as in a file of settings.

        Raises:
            ConfigError: A setting does not exist, cannot change, or its value cannot be; one line
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
        """Read all sources again, and take over what can change.

        Raises:
            ConfigError: The sources are wrong. Nothing has changed.
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
        """Go back to the settings as they were after an entry of the journal; 0: at the start.

        Raises:
            ConfigError: There is no such entry any more, or a file of then cannot be read.
        """
        if number not in self._states:
            raise ConfigError(f"to: entry {number} is not in the journal")
        return self._take(self._states[number], cause, dry_run=dry_run)

    def shown(self, path: str, value: object) -> object:
        """A value for people: secrets are hidden."""
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

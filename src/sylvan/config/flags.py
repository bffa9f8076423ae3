"""Parses the command line: every field is a flag; commands add options and positionals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sylvan.config.fields import nearest
from sylvan.config.schema import SERVE, Schema
from sylvan.config.sources import SourceSettings, combined, named
from sylvan.protocol.errors import ConfigError

_SWITCH_VALUES = frozenset({"true", "false", "on", "off", "auto", "none"})


@dataclass(frozen=True, slots=True)
class Option:
    """A flag of a command that is not a field: `--json`. `metavar` is empty for a switch."""

    name: str
    doc: str
    metavar: str = ""
    short: str = ""


CONFIG_OPTIONS = (
    Option("config", "Read settings from a YAML, JSON or TOML file.", metavar="FILE"),
    Option("preset", "Start from a named set of settings: debug.", metavar="NAME"),
)
HELP = Option("help", "Show this help.", short="h")


@dataclass(slots=True)
class Parsed:
    """The parsed command line."""

    positions: list[str] = field(default_factory=list[str])
    options: dict[str, str] = field(default_factory=dict[str, str])
    given: SourceSettings = field(default_factory=SourceSettings)

    def has(self, name: str) -> bool:
        """Whether the option was given."""
        return name in self.options


@dataclass(slots=True)
class _Flag:
    """A word that starts with a dash, split into its parts."""

    spelled: str
    name: str  # Python spelling
    value: str | None  # after `=`


def parse_flags(
    words: Sequence[str], options: Iterable[Option] = (), *, tree: Schema[Any] | None = SERVE
) -> Parsed:
    """Read a command line: `--cache.page-size 16`, `--deterministic`, `--port=8000`, `MODEL`.

    Args:
        words: Arguments after the command's name.
        options: Options of the command.
        tree: Schema of the settings that are also flags, if any.

    Raises:
        ConfigError: all unknown flags and missing or invalid values, one line each.
    """
    reader = _Reader(list(words), {o.name: o for o in options}, tree=tree)
    reader.run()
    if reader.errors:
        raise ConfigError("\n".join(reader.errors))
    reader.parsed.given = combined(reader.parts)
    return reader.parsed


class _Reader:
    """Consumes words from the front; collects errors instead of stopping at the first."""

    def __init__(
        self, words: list[str], options: Mapping[str, Option], *, tree: Schema[Any] | None
    ) -> None:
        self._words = words
        self._options = options
        self._short = {f"-{o.short}": o.name for o in options.values() if o.short}
        self._tree = tree
        self._repeated: dict[str, list[str]] = {}
        self.parsed = Parsed()
        self.parts: list[SourceSettings] = []
        self.errors: list[str] = []

    def run(self) -> None:
        """Read all words."""
        while self._words:
            word = self._words.pop(0)
            if word == "--":
                self.parsed.positions += self._words
                break
            if word in self._short:
                word = f"--{self._short[word]}"
            if not word.startswith("-") or word == "-" or _is_number(word):
                self.parsed.positions.append(word)
                continue
            self._tried(self._flag, _split(word))
        for name, words in self._repeated.items():
            self._tried(self._add, _Flag("--" + name.replace("_", "-"), name, None), words)

    def _tried(self, action: Callable[..., None], *args: object) -> None:
        try:
            action(*args)
        except ConfigError as error:
            self.errors.append(str(error))

    def _add(self, flag: _Flag, value: object) -> None:
        assert self._tree is not None, "a command without settings has no aliases"
        self.parts.append(named(flag.name, value, "flag", flag.spelled, self._tree))

    def _flag(self, flag: _Flag) -> None:
        option = self._options.get(flag.name)
        if option:
            if not option.metavar and flag.value is not None:
                raise ConfigError(f"{flag.spelled} takes no value")
            value = self._value(flag) if option.metavar else ""
            self.parsed.options[flag.name] = value
        elif self._tree is not None:
            self._setting(self._tree, flag)
        else:
            known = [f"--{name}" for name in self._options]
            raise ConfigError(f"{flag.spelled}: unknown flag{nearest(flag.spelled, known)}")

    def _setting(self, tree: Schema[Any], flag: _Flag) -> None:
        name = flag.name
        alias = None if name in tree.fields else tree.aliases.get(name)
        info = tree.fields.get(name)
        section = tree.sections.get(name)
        value: object
        if (info and info.is_switch) or (alias and alias.is_switch) or (section and name):
            value = self._switch_value(flag)
        elif alias and alias.repeats:
            self._repeated.setdefault(name, []).extend(self._many(flag))
            return
        elif alias and alias.takes_many:
            value = self._many(flag)
        elif info or alias:
            value = self._value(flag)
        else:
            value = None  # `named` explains the unknown name
        self._add(flag, value)

    def _value(self, flag: _Flag) -> str:
        if flag.value is not None:
            return flag.value
        if not self._words or (self._words[0].startswith("-") and not _is_value(self._words[0])):
            raise ConfigError(f"{flag.spelled} needs a value")
        return self._words.pop(0)

    def _switch_value(self, flag: _Flag) -> str:
        """Use the next word as the value of a switch only if it can be nothing else."""
        if flag.value is not None:
            return flag.value
        if self._words and self._words[0].lower() in _SWITCH_VALUES:
            return self._words.pop(0)
        return "true"

    def _many(self, flag: _Flag) -> list[str]:
        if flag.value is not None:
            return [flag.value]
        taken = [self._value(flag)]
        while self._words and not self._words[0].startswith("-"):
            taken.append(self._words.pop(0))
        return taken


def _split(word: str) -> _Flag:
    spelled, sign, value = word.partition("=")
    name = spelled.lstrip("-").replace("-", "_")
    return _Flag(spelled, name, value if sign else None)


def _is_value(word: str) -> bool:
    return word == "-" or _is_number(word)


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True

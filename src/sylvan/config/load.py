"""defaults < preset < file < environment < flags, with the origin of every value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, cast

import msgspec

from sylvan.config.fields import SectionInfo, get, nearest
from sylvan.config.parse import parse
from sylvan.config.schema import SERVE, Root, Schema
from sylvan.config.tree import Config, Section
from sylvan.protocol.errors import ConfigError

Origin = Literal["default", "preset", "file", "environment", "flag", "keyword", "auto"]

_ON: Mapping[str, object] = {}
_SECTION_WORDS: Mapping[str, object] = {
    **dict.fromkeys(("", "true", "on"), _ON),
    **dict.fromkeys(("none", "null", "off")),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """A value given by the user. `spelled` is how it was written, for messages: `--page-size`."""

    path: str
    value: object
    origin: Origin
    spelled: str


@dataclass(frozen=True, slots=True)
class LoadedConfig(Generic[Root]):
    """The tree, and the winning setting of each path that was given. `notes` are for display."""

    config: Root
    given: Mapping[str, Setting] = field(default_factory=dict[str, Setting])
    notes: tuple[str, ...] = ()


def load(settings: Sequence[Setting], notes: Iterable[str] = ()) -> LoadedConfig[Config]:
    """The configuration of a runtime; see `load_as`."""
    return load_as(SERVE, settings, notes)


def load_as(
    schema: Schema[Root], settings: Sequence[Setting], notes: Iterable[str] = ()
) -> LoadedConfig[Root]:
    """Build the tree from settings in ascending precedence.

    Raises:
        ConfigError: unknown fields, wrong types, values out of range, or a path given twice by the
            same source; one line for each, naming path and source.
    """
    errors: list[str] = []
    given: dict[str, Setting] = {}
    for setting in settings:
        try:
            _add(schema, given, _parsed(schema, setting))
        except ValueError as error:
            errors.append(f"{setting.spelled}: {error}")
    if errors:
        raise ConfigError("\n".join(errors))
    return LoadedConfig(_build(schema, given), given, tuple(dict.fromkeys(notes)))


def flatten(
    tree: Mapping[str, object], prefix: str = "", *, schema: Schema[Any] = SERVE
) -> Iterable[tuple[str, object]]:
    """Flatten nested sections to (path, value); an empty section stays, as `{}`."""
    for key, value in tree.items():
        path = f"{prefix}{str(key).replace('-', '_')}"
        if path in schema.sections and isinstance(value, Mapping) and value:
            nested = cast("Mapping[str, object]", value)
            yield from flatten(nested, f"{path}.", schema=schema)
        else:
            yield path, value


def dump(config: Section, *, defaults: bool = True, schema: Schema[Any] = SERVE) -> dict[str, Any]:
    """The tree as plain data that `load` reads back; omits secrets.

    Args:
        config: The tree.
        defaults: Include values that are their field's default.
        schema: Schema of the tree.
    """
    tree: dict[str, Any] = {}
    for path, info in schema.fields.items():
        section, _, leaf = path.rpartition(".")
        value = get(config, path)
        absent = section and get(config, section) is None
        if absent or info.is_secret or (not defaults and value == info.default):
            continue
        node = tree.setdefault(section, {}) if section else tree
        node[leaf] = msgspec.to_builtins(value)
    return tree


def _parsed(schema: Schema[Any], setting: Setting) -> Setting:
    path, value = setting.path, setting.value
    fields = schema.fields
    info = schema.sections.get(path)
    if info is not None and path:
        value = _whole_section(info, value)
    elif path in fields:
        value = parse(fields[path], value)
    else:
        raise ValueError(f"unknown field {path!r}{nearest(path, fields)}")
    return Setting(path, value, setting.origin, setting.spelled)


def _whole_section(info: SectionInfo, value: object) -> object:
    """`{}` turns an optional section on, None turns it off."""
    if isinstance(value, str) and info.optional:
        value = _SECTION_WORDS.get(value.lower(), value)
    if value == {} or (value is None and info.optional):
        return value
    raise ValueError(f"{info.path!r} is a section; give its fields, as in {info.path}.NAME")


def _add(schema: Schema[Any], given: dict[str, Setting], setting: Setting) -> None:
    known = given.get(setting.path)
    if known and known.origin == setting.origin and known.value != setting.value:
        raise ValueError(f"contradicts {known.spelled}; both set {setting.path}")
    if setting.value is None and setting.path in schema.sections:
        for path in [p for p in given if p.startswith(f"{setting.path}.")]:
            del given[path]
    given.pop(setting.path, None)  # keep the order of precedence
    given[setting.path] = setting


def _build(schema: Schema[Root], given: Mapping[str, Setting]) -> Root:
    sections = schema.sections
    parts: dict[str, dict[str, Any] | None] = {
        path: None if info.optional else {} for path, info in sections.items()
    }
    for path, setting in given.items():
        section, _, leaf = path.rpartition(".")
        if path in sections:
            parts[path] = None if setting.value is None else parts[path] or {}
        else:
            part = parts[section] if parts[section] is not None else {}
            assert part is not None
            part[leaf] = setting.value
            parts[section] = part
    root = parts.pop("") or {}
    for path, values in parts.items():
        root[path] = None if values is None else _section(schema, sections[path], values)
    return schema.root(**root)


def _section(schema: Schema[Any], info: SectionInfo, values: dict[str, Any]) -> object:
    missing = [
        path
        for path, item in schema.fields.items()
        if path.rpartition(".")[0] == info.path
        and item.default is msgspec.NODEFAULT
        and path.rpartition(".")[2] not in values
    ]
    if missing:
        raise ConfigError(f"{info.path} also needs {', '.join(missing)}")
    return info.type(**values)

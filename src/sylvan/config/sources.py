"""Reads settings from presets, files and Python keywords, and combines all sources."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec

from sylvan.config import env
from sylvan.config.fields import nearest
from sylvan.config.load import LoadedConfig, Origin, Setting, flatten, load_as
from sylvan.config.schema import SERVE, Root, Schema
from sylvan.config.tree import Config, Section
from sylvan.protocol.errors import ConfigError

PRESETS: Mapping[str, Mapping[str, object]] = {
    "debug": {
        "processes": "one",
        "runner": "eager",
        "scheduler.overlap": "off",
        "observe.log_level": "debug",
    },
}


@dataclass(frozen=True, slots=True)
class SourceSettings:
    """Settings of one source, and notes about names without effect."""

    settings: tuple[Setting, ...] = ()
    notes: tuple[str, ...] = ()


def gather(
    given: SourceSettings,
    *,
    file: str | None = None,
    preset: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> LoadedConfig[Config]:
    """Load settings from preset, file, environment and `given` (flags or keywords); the last wins.

    Raises:
        ConfigError: see `load`; also an unreadable file or unknown preset.
    """
    file = file or env.config_file(environ)
    preset = preset or env.preset(environ)
    return gather_as(SERVE, given, file=file, preset=preset, environ=environ)


def gather_as(
    schema: Schema[Root],
    given: SourceSettings,
    *,
    file: str | None = None,
    preset: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> LoadedConfig[Root]:
    """Load the settings of a schema from all sources.

    Raises:
        ConfigError: see `load`; also an unreadable file or unknown preset.
    """
    from_file = read_file(Path(file), schema) if file else SourceSettings()
    settings = [
        *(read_preset(preset) if preset else ()),
        *from_file.settings,
        *env.read(environ, schema),
        *given.settings,
    ]
    return load_as(schema, settings, (*from_file.notes, *given.notes))


def read_preset(name: str) -> Iterable[Setting]:
    """Settings of a named preset.

    Raises:
        ConfigError: there is no such preset.
    """
    if name not in PRESETS:
        choices = nearest(name, PRESETS) or f"; there is {', '.join(PRESETS)}"
        raise ConfigError(f"--preset: unknown preset {name!r}{choices}")
    for path, value in PRESETS[name].items():
        yield Setting(path, value, "preset", f"preset {name}")


def read_file(path: Path, schema: Schema[Any] = SERVE) -> SourceSettings:
    """Settings of a YAML, JSON or TOML file, by its suffix (YAML if unknown).

    Raises:
        ConfigError: it is unreadable, or not a table of settings.
    """
    try:
        text = path.read_text()
        tree = _parse_file(path, text)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error}") from error
    if tree is None:
        return SourceSettings()
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected a table of settings, got {type(tree).__name__}")
    return _named(schema, cast("dict[object, object]", tree), "file", f"in {path}")


def from_keywords(keywords: Mapping[str, object]) -> SourceSettings:
    """Settings of Python keywords: `cache__page_size=16`, `cache={"page_size": 16}`, or an alias.

    Raises:
        ConfigError: unknown names.
    """
    tree = {name.replace("__", "."): _plain(value) for name, value in keywords.items()}
    return _named(SERVE, tree, "keyword", "")


def named(
    name: str, value: object, origin: Origin, spelled: str, schema: Schema[Any] = SERVE
) -> SourceSettings:
    """The settings for a value under the name of a field, section or alias.

    Raises:
        ConfigError: there is no such name, or the alias rejects the value.
    """
    if name in schema.fields or name in schema.sections:
        return SourceSettings((Setting(name, value, origin, spelled),))
    alias = schema.aliases.get(name)
    if alias is None:
        raise ConfigError(f"{spelled}: unknown {_kind(origin)}{_hint(schema, name, origin)}")
    try:
        settings = [Setting(path, v, origin, spelled) for path, v in alias.convert(value)]
    except (ValueError, KeyError) as error:
        raise ConfigError(f"{spelled}: {error}") from error
    notes = (f"{spelled} has no effect: {alias.note}",) if alias.note else ()
    return SourceSettings(tuple(settings), notes)


def combined(parts: Sequence[SourceSettings]) -> SourceSettings:
    """Combine all settings and notes, in order."""
    return SourceSettings(
        tuple(s for part in parts for s in part.settings),
        tuple(n for part in parts for n in part.notes),
    )


def _named(
    schema: Schema[Any], tree: Mapping[Any, object], origin: Origin, where: str
) -> SourceSettings:
    parts: list[SourceSettings] = []
    errors: list[str] = []
    plain = {str(key): value for key, value in tree.items()}
    for name, value in flatten(plain, schema=schema):
        try:
            parts.append(named(name, value, origin, f"{name} {where}".strip(), schema))
        except ConfigError as error:
            errors.append(str(error))
    if errors:
        raise ConfigError("\n".join(errors))
    return combined(parts)


def _parse_file(path: Path, text: str) -> object:
    match path.suffix.lower():
        case ".json":
            return json.loads(text)
        case ".toml":
            return tomllib.loads(text)
        case _:
            import yaml  # imported only if needed

            try:
                return yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise ValueError(str(error)) from error


def _plain(value: object) -> object:
    """Convert a section object to a table of the values that differ from the defaults."""
    if not isinstance(value, Section):
        return value
    items = msgspec.structs.fields(value)
    return {f.name: v for f in items if (v := getattr(value, f.name)) != f.default}


def _kind(origin: Origin) -> str:
    return "flag" if origin == "flag" else "field"


def _hint(schema: Schema[Any], name: str, origin: Origin) -> str:
    fields = schema.fields
    known = [*fields, *(path for path in schema.sections if path), *schema.aliases]
    leaves = {path.rpartition(".")[2]: path for path in fields}
    close = leaves.get(name.rpartition(".")[2])
    if origin != "flag":
        return f" (did you mean {close}?)" if close else nearest(name, known)
    spellings = ["--" + k.replace("_", "-") for k in known]
    if close:
        return f" (did you mean {fields[close].flag}?)"
    return nearest("--" + name.replace("_", "-"), spellings)
